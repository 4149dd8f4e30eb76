"""The checks of lesson 10."""

from itertools import islice

import numpy as np
import pytest
import run_all
import torch
from torch import nn
from torch.nn.utils import clip_grad_value_, parameters_to_vector
from torch.utils.data import DataLoader

from notebooks.checks import lesson10 as check
from tests.check_answers import Answers, answers_test, stored, told


@pytest.fixture
def frameworks():
    if lacks := run_all.missing(run_all.FOLDER / "10_frameworks.ipynb"):
        pytest.skip(lacks)


changed_back = stored("10_frameworks", "back_solution", clip_grad_value_=clip_grad_value_)
CLIP = "clip_grad_norm_(net.parameters(), 8.0)"


def back(*changes):
    """The solution of exercise 2 on the CPU, with changes."""
    return changed_back('.to("cuda")', "", *changes)


OF_THE_LESSON = back()(check.samples())  # its `given.net`
EACH = " / 2", "", "% 2", "% 1"  # an update after each batch
BACK = Answers(
    check.back,
    right=[
        back(),
        back(*EACH, "batch_size=8", "batch_size=16"),  # the same batches, two at once
        back("return net", "return nn.Sequential(net)"),
    ],
    wrong=[
        (back(" / 2", ""), "Each loss must be divided"),
        (back("loss.backward()", f"loss.backward()\n        {CLIP}"), "Lightning clips once, just before the update"),
        (back(CLIP, "pass"), "The gradients are not clipped"),
        (back(*EACH), "takes a step after each batch"),
        (back("clip_grad_norm_", "clip_grad_value_"), "Clip the norm of all of them"),
        (back(" / 2", "", "lr=0.1", "lr=0.05"), "clipped to 4, or divided after the clipping"),
        (back("    optimizer.zero_grad()", "optimizer.zero_grad()"), "The first of two batches has no effect"),
        (back("optimizer.zero_grad()", ""), "never set to zero"),
        (lambda samples: OF_THE_LESSON, "Compare seed, order"),
        (lambda samples: nn.Linear(3, 1), "It has 4 parameters"),
        (lambda samples: 3, "It returned 3. Return the net"),
    ],
)
RIGHT = {"lightning": 256, "accelerate": 64, "split": 16, "trainer": 128, "torchrun": 64, "fsdp": 64}
IMAGES = Answers(
    check.images_per_step,
    right=[RIGHT],
    wrong=[
        (RIGHT | {"lightning": 128}, "leaves out the accumulation"),
        (RIGHT | {"accelerate": 16}, "the loader's batch size is for one process"),
        (RIGHT | {"split": 64}, "without split_batches"),
        (RIGHT | {"trainer": 32}, "counts one GPU"),
        (RIGHT | {"torchrun": 256}, "each process uses one"),
        (RIGHT | {"fsdp": 16}, "each rank has images of its own"),
        ({"lightning": 256}, "a number for each of"),
    ],
)


SILENT = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
changed_job = stored("10_frameworks", "Regression", "converted_solution", SILENT=SILENT)


def lightning_job(*changes):
    """The solution of exercise 1 on the CPU, with changes. It is made when it is called: Lightning may not be here."""
    return lambda samples: changed_job('accelerator="gpu", devices=1', 'accelerator="cpu"', *changes)[1](samples)


NO_WARM_UP = "check.rate", "lambda step: 1.0"
NO_CLIP, PER_EPOCH = ("gradient_clip_val=8.0, ", ""), ('"step"', '"epoch"')
CONVERTED = Answers(
    check.converted,
    right=[lightning_job(), lightning_job("max_epochs=1", 'max_epochs=1, precision="64-true"')],
    wrong=[
        (lightning_job(*PER_EPOCH), "calls a scheduler after each epoch"),
        (lightning_job(*NO_WARM_UP), "Return the scheduler from configure_optimizers"),
        (lightning_job(*NO_CLIP), "The gradients are not clipped. That is an argument"),
        (lightning_job(*NO_WARM_UP, *NO_CLIP), "not clipped, and the learning rate has no warm-up"),
        (lightning_job(*PER_EPOCH, *NO_CLIP), "not clipped, and the learning rate stays"),
        (lightning_job("batch_size=8", "batch_size=16"), "Lightning has taken 4 steps, and the plain loop takes 8"),
        (lightning_job("=8.0", '=8.0, gradient_clip_algorithm="value"'), "Clip the norm of all of them"),
        (lightning_job("=8.0", "=1.0"), "clips the gradients to 1, and the plain loop clips them to 8"),
        (lightning_job("=8.0", '=8.0, precision="bf16-mixed"'), "precision is bf16-mixed"),
        (lightning_job("check.rate", "lambda step: check.rate(2 * step)"), "takes two steps per batch"),
        (lambda samples: lightning_job()(check.samples()), "Compare seed, order"),
        (lambda samples: type(lightning_job()(samples))(), "No Trainer has trained the module"),
        (back(), "Return the LightningModule"),
    ],
    fixtures="frameworks",
)


def test_back_is_what_lightning_computes(frameworks):
    module = lightning_job(*NO_WARM_UP, "max_epochs=1", "max_epochs=1, accumulate_grad_batches=2")(check.samples())
    assert told(check.back(lambda samples: lightning_job()(samples).net), "calls Lightning's Trainer")
    found, right = (parameters_to_vector(net.parameters()) for net in (module, OF_THE_LESSON))
    torch.testing.assert_close(found, right)


loader = stored("10_frameworks", "ContinuingSolution", np=np)


class Iterator(loader()):
    """Without a generator: it counts in an iterator of its own, and skips as soon as the loop begins."""

    def __iter__(self):
        batches = DataLoader.__iter__(self)
        self.done, self.skip = self.skip, 0
        list(islice(batches, self.done))
        return map(self.count, batches)

    def count(self, batch):
        self.done += 1
        return batch


DONE, READ, COUNT, BATCHES = "self.done % len(self)", 'state["done"]', "self.done = number", "super().__iter__()"
STATE = f'{{"done": {DONE}}}'
LEN = "    def __len__(self):\n        return {}\n\n    def state_dict"
CONTINUING = Answers(
    check.continuing,
    right=[
        loader(),
        loader(DONE, "self.done", READ, f"{READ} % 7"),  # after the last batch of an epoch
        loader(STATE, f'{{"loader": {{"done": float({DONE})}}, "of": len(self)}}', READ, 'state["loader"]["done"]'),
        Iterator,
    ]
    * 3,  # how many batches are done is drawn anew
    wrong=[
        (loader(STATE, "..."), "still returns `...`"),
        (loader(DONE, f"np.int64({DONE})"), "`int(...)` makes one"),
        (loader(STATE, DONE), "Return a dictionary"),
        (loader(DONE, f"{DONE} * self.batch_size", READ, f"{READ} // self.batch_size"), "Count batches, not samples"),
        (loader(COUNT, "self.done = skip if number <= skip else self.done + 1"), "After a loop that ended early"),
        (DataLoader, "has no method `state_dict`"),
        (loader("load_state_dict", "load"), "has no method `load_state_dict`"),
        (list, "is not a class that inherits from DataLoader"),
        (loader(f"self.skip = {READ}", "pass"), "It begins anew. Does"),
        (loader(COUNT, "self.done = number - 1"), "count before it"),
        (loader(COUNT, "self.done += number > skip"), "When a loader that has continued is saved again"),
        (loader("self.skip = 0", "pass"), "In the epoch after the one that was resumed"),
        (loader("number > skip", "number > skip + (skip > 0)"), "It leaves one out"),
        (loader(BATCHES, "DataLoader(self.dataset, 2)"), "Keep the sampler's order"),
        (loader(DONE, "3 if self.done else 0"), "the loader should begin with batch"),
        (loader(DONE, "self.done"), "Once the last batch of an epoch is done"),
        (loader("    def state_dict", LEN.format("7 - self.skip")), "`len` changes after a restart"),
        (loader("    def state_dict", LEN.format(12)), "is 12. Leave it alone"),
    ],
)

test_answers = answers_test({"converted": CONVERTED, "back": BACK, "images_per_step": IMAGES, "continuing": CONTINUING})
