"""The checks of lesson 10."""

from itertools import islice

import numpy as np
import pytest
import run_all
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.utils.data import DataLoader

from notebooks.checks import lesson10 as check
from tests.check_answers import Answers, answers_test, told

LACKS = run_all.missing(run_all.FOLDER / "10_frameworks.ipynb")


@pytest.fixture
def frameworks():
    if LACKS:
        pytest.skip(LACKS)


def loop(every=2, divide=2, clip=check.CLIP, clip_each=False, rate=0.1, seed=0, batch=8, how=clip_grad_norm_, zero=2):
    """A plain loop with the mistakes that are asked for."""

    def back(samples):
        torch.manual_seed(seed)
        net = nn.Linear(4, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=rate)
        for number, (x, y) in enumerate(DataLoader(samples, batch_size=batch), start=1):
            (mse_loss(net(x), y) / divide).backward()
            if clip and (clip_each or number % every == 0):
                how(net.parameters(), clip)
            if number % every == 0:
                sgd.step()
            if zero and number % zero == 0:
                sgd.zero_grad()
        return net

    return back


OF_THE_LESSON = loop()(check.samples())  # its `given.net`
BACK = Answers(
    check.back,
    right=[
        loop(),
        loop(batch=16, every=1, divide=1, zero=1),  # the same batches, two at once
        lambda samples: nn.Sequential(loop()(samples)),
    ],
    wrong=[
        (loop(divide=1), "Each loss must be divided"),
        (loop(clip_each=True), "Lightning clips once, just before the update"),
        (loop(clip=None), "The gradients are not clipped"),
        (loop(every=1, divide=1, zero=1), "takes a step after each batch"),
        (loop(how=clip_grad_value_), "Clip the norm of all of them"),
        (loop(divide=1, rate=0.05), "divided after the clipping"),
        (loop(clip=4.0), "clipped to 4"),
        (loop(clip=1.0), "clipping and number of steps"),
        (loop(zero=1), "The first of two batches has no effect"),
        (loop(zero=None), "never set to zero"),
        (lambda samples: OF_THE_LESSON, "Compare seed, order"),
        (loop(seed=1), "Compare seed, order"),
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


def lightning_job(warm_up=check.rate, interval="step", batch=8, **options):
    """A conversion to Lightning with the mistakes that are asked for."""

    def converted(samples):
        import lightning as L

        class Regression(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = nn.Linear(4, 1)

            def training_step(self, samples, index):
                x, y = samples
                return mse_loss(self.net(x), y)

            def configure_optimizers(self):
                sgd = torch.optim.SGD(self.parameters(), lr=0.1)
                if not warm_up:
                    return sgd
                schedule = torch.optim.lr_scheduler.LambdaLR(sgd, warm_up)
                return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        torch.manual_seed(0)
        module = Regression()
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, **off | {"gradient_clip_val": check.CLIP} | options)
        trainer.fit(module, DataLoader(samples, batch_size=batch))
        return module

    return converted


CONVERTED = Answers(
    check.converted,
    right=[lightning_job(), lightning_job(precision="64-true")],
    wrong=[
        (lightning_job(interval="epoch"), "calls a scheduler after each epoch"),
        (lightning_job(warm_up=None), "Return the scheduler from configure_optimizers"),
        (lightning_job(gradient_clip_val=None), "The gradients are not clipped. That is an argument"),
        (lightning_job(warm_up=None, gradient_clip_val=None), "not clipped, and the learning rate has no warm-up"),
        (lightning_job(interval="epoch", gradient_clip_val=None), "not clipped, and the learning rate stays"),
        (lightning_job(batch=16), "Lightning has taken 4 steps, and the plain loop takes 8"),
        (lightning_job(gradient_clip_algorithm="value"), "Clip the norm of all of them"),
        (lightning_job(gradient_clip_val=1.0), "clips the gradients to 1, and the plain loop clips them to 8"),
        (lightning_job(precision="bf16-mixed"), "precision is bf16-mixed"),
        (lightning_job(warm_up=lambda step: check.rate(2 * step)), "takes two steps per batch"),
        (lambda samples: lightning_job()(check.samples()), "Compare seed, order"),
        (lambda samples: type(lightning_job()(samples))(), "No Trainer has trained the module"),
        (loop(), "Return the LightningModule"),
    ],
    fixtures="frameworks",
)


def test_back_is_what_lightning_computes(frameworks):
    module = lightning_job(warm_up=None, accumulate_grad_batches=2)(check.samples())
    assert told(check.back(lambda samples: lightning_job()(samples).net), "calls Lightning's Trainer")
    found, right = (parameters_to_vector(net.parameters()) for net in (module, OF_THE_LESSON))
    torch.testing.assert_close(found, right)


def iterating(once=True, more=0, count=lambda self, number, skip: number):
    """The solution's `__iter__`, or one with a mistake. count: the batches that are done when it gives one."""

    def __iter__(self):
        skip = self.skip
        if once:
            self.skip = 0
        for number, batch in enumerate(DataLoader.__iter__(self), start=1):
            self.done = count(self, number, skip)
            if number > skip + more * (skip > 0):
                yield batch

    return __iter__


def loader(**methods):
    """The solution with other methods."""
    solution = {
        "__iter__": iterating(),
        "state_dict": lambda self: {"done": self.done % len(self)},
        "load_state_dict": lambda self, state: setattr(self, "skip", state["done"]),
    }
    return type("Continuing", (DataLoader,), {"done": 0, "skip": 0} | solution | methods)


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


def sequential(self):
    skip, self.skip = self.skip, 0
    for number in range(skip, 7):
        self.done = number + 1
        yield [self.dataset.tensors[0][2 * number : 2 * number + 2]]


BEGINS_THE_NEXT_EPOCH = loader(  # a position after the last batch is kept as it is, and understood when it is read
    state_dict=lambda self: {"done": self.done, "loader": "the first"},
    load_state_dict=lambda self, state: setattr(self, "skip", state["done"] % 7),
)
NESTED = loader(  # in a dictionary within the state, as a float
    state_dict=lambda self: {"loader": {"done": float(self.done % len(self))}, "of": len(self)},
    load_state_dict=lambda self, state: setattr(self, "skip", state["loader"]["done"]),
)
SAMPLES = loader(
    state_dict=lambda self: {"done": self.done % len(self) * self.batch_size},
    load_state_dict=lambda self, state: setattr(self, "skip", state["done"] // self.batch_size),
)
CONTINUING = Answers(
    check.continuing,
    right=[loader(), BEGINS_THE_NEXT_EPOCH, NESTED, Iterator] * 3,  # how many batches are done is drawn anew
    wrong=[
        (loader(state_dict=lambda self: ...), "still returns `...`"),
        (loader(state_dict=lambda self: None), "returned None"),
        (loader(state_dict=lambda self: {"done": np.int64(self.done % 7)}), "`int(...)` makes one"),
        (loader(state_dict=lambda self: self.done % 7), "Return a dictionary"),
        (SAMPLES, "Count batches, not samples"),
        (loader(__iter__=iterating(count=lambda self, number, skip: skip if number <= skip else self.done + 1)),
         "After a loop that ended early"),
        (DataLoader, "has no method `state_dict`"),
        (loader(load_state_dict=None), "has no method `load_state_dict`"),
        (list, "is not a class that inherits from DataLoader"),
        (loader(load_state_dict=lambda self, state: None), "It begins anew. Does"),
        (loader(__iter__=lambda self: DataLoader.__iter__(self)), "does `__iter__` skip"),
        (loader(__iter__=iterating(count=lambda self, number, skip: number - 1)), "count before it"),
        (loader(__iter__=iterating(count=lambda self, number, skip: max(number - skip, 0))),
         "count the batches that were skipped"),
        (loader(__iter__=iterating(count=lambda self, number, skip: self.done + (number > skip))),
         "When a loader that has continued is saved again"),
        (loader(__iter__=iterating(once=False)), "In the epoch after the one that was resumed"),
        (loader(__iter__=iterating(more=1)), "It leaves one out"),
        (loader(__iter__=sequential), "Keep the sampler's order"),
        (loader(state_dict=lambda self: {"done": 3 if self.done else 0}), "the loader should begin with batch"),
        (loader(state_dict=lambda self: {"done": self.done}), "Once the last batch of an epoch is done"),
        (loader(__len__=lambda self: 7 - self.skip), "`len` changes after a restart"),
        (loader(__len__=lambda self: 12), "is 12. Leave it alone"),
        (loader(__init__=lambda self, data, batch_size: None), "TypeError"),
    ],
)  # fmt: skip

test_answers = answers_test({"converted": CONVERTED, "back": BACK, "images_per_step": IMAGES, "continuing": CONTINUING})
