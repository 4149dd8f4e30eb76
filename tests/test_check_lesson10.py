"""The checks of lesson 10: solutions pass, typical mistakes are explained, nothing raises."""

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
from tests.check_answers import explains, survives_strange_answers, told

LACKS = run_all.missing(run_all.FOLDER / "10_frameworks.ipynb")
needs_frameworks = pytest.mark.skipif(bool(LACKS), reason=LACKS)


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.converted, check.back, check.images_per_step, check.continuing)


def loop(
    accumulate=2, divide=2, clip=check.CLIP, clip_each=False, rate=0.1, seed=0, batch=8, how=clip_grad_norm_, zero=2
):
    """A plain loop with the mistakes that are asked for."""

    def back(samples):
        torch.manual_seed(seed)
        net = nn.Linear(4, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=rate)
        for number, (x, y) in enumerate(DataLoader(samples, batch_size=batch), start=1):
            (mse_loss(net(x), y) / divide).backward()
            if clip and (clip_each or number % accumulate == 0):
                how(net.parameters(), clip)
            if number % accumulate == 0:
                sgd.step()
            if zero and number % zero == 0:
                sgd.zero_grad()
        return net

    return back


def test_back():
    assert check.back(loop())
    assert check.back(loop(batch=16, accumulate=1, divide=1, zero=1))  # the same batches, two at once
    assert check.back(lambda samples: nn.Sequential(loop()(samples)))
    left = loop()(check.samples())  # as `given.net` of the lesson
    explains(
        check.back,
        (loop(divide=1), "Each loss must be divided"),
        (loop(clip_each=True), "Lightning clips once, just before the update"),
        (loop(clip=None), "The gradients are not clipped"),
        (loop(accumulate=1, divide=1, zero=1), "takes a step after each batch"),
        (loop(how=clip_grad_value_), "Clip the norm of all of them"),
        (loop(divide=1, rate=0.05), "divided after the clipping"),
        (loop(clip=4.0), "clipped to 4"),
        (loop(clip=1.0), "clipping and number of steps"),
        (loop(zero=1), "The first of two batches has no effect"),
        (loop(zero=None), "never set to zero"),
        (lambda samples: left, "Compare seed, order"),
        (loop(seed=1), "Compare seed, order"),
        (loop(rate=0.2), "learning rate"),
        (lambda samples: nn.Linear(3, 1), "It has 4 parameters"),
        (lambda samples: 3, "It returned 3. Return the net"),
    )


def test_images_per_step():
    right = {"lightning": 256, "accelerate": 64, "split": 16, "trainer": 128, "torchrun": 64, "fsdp": 64}
    assert check.images_per_step(right)
    explains(
        lambda wrong: check.images_per_step(right | wrong),
        ({"lightning": 128}, "leaves out the accumulation"),
        ({"accelerate": 16}, "the loader's batch size is for one process"),
        ({"split": 64}, "without split_batches"),
        ({"trainer": 32}, "counts one GPU"),
        ({"torchrun": 256}, "each process uses one"),
        ({"fsdp": 16}, "each rank has images of its own"),
    )
    told(check.images_per_step({"lightning": 256}), "a number for each of")


def lightning_job(warm_up=check.rate, interval="step", batch=8, **options):
    """A conversion to Lightning with the mistakes that are asked for."""
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

    def converted(samples):
        torch.manual_seed(0)
        module = Regression()
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, **off | {"gradient_clip_val": check.CLIP} | options)
        trainer.fit(module, DataLoader(samples, batch_size=batch))
        return module

    return converted


@needs_frameworks
def test_converted():
    assert check.converted(lightning_job())
    assert check.converted(lightning_job(precision="64-true"))
    left = lightning_job()(check.samples())
    explains(
        check.converted,
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
        (lambda samples: left, "Compare seed, order"),
        (lambda samples: type(left)(), "No Trainer has trained the module"),
        (loop(), "Return the LightningModule"),
    )


@needs_frameworks
def test_back_is_what_lightning_computes():
    module = lightning_job(warm_up=None, accumulate_grad_batches=2)(check.samples())
    told(check.back(lambda samples: lightning_job()(samples).net), "calls Lightning's Trainer")
    net = loop()(check.samples())
    torch.testing.assert_close(parameters_to_vector(module.parameters()), parameters_to_vector(net.parameters()))


class Continuing(DataLoader):
    """The solution of exercise 4, in pieces that the answers below replace."""

    done = skip = 0

    def __iter__(self):
        skip, self.skip = self.skip, 0
        for number, batch in enumerate(super().__iter__(), start=1):
            self.done = number
            if number > skip:
                yield batch

    def state_dict(self):
        return {"done": self.done % len(self)}

    def load_state_dict(self, state):
        self.skip = state["done"]


class Islice(Continuing):
    """Another right answer."""

    def __iter__(self):
        self.done, self.skip = self.skip, 0
        for batch in islice(super(Continuing, self).__iter__(), self.done, None):
            self.done += 1
            yield batch


class BeginsTheNextEpoch(Continuing):
    """A position after the last batch that is kept as it is, and understood when it is read."""

    def state_dict(self):
        return {"done": self.done, "loader": "the first"}

    def load_state_dict(self, state):
        self.skip = 0 if state["done"] >= len(self) else state["done"]


class Nested(Continuing):
    """A position in a dictionary within the state, as a float."""

    def state_dict(self):
        return {"loader": {"done": float(self.done % len(self))}, "of": len(self)}

    def load_state_dict(self, state):
        self.skip = state["loader"]["done"]


class Iterator(Continuing):
    """Without a generator: it counts in an iterator of its own, and skips as soon as the loop begins."""

    def __iter__(self):
        batches = super(Continuing, self).__iter__()
        self.done, self.skip = self.skip, 0
        list(islice(batches, self.done))
        return map(self.count, batches)

    def count(self, batch):
        self.done += 1
        return batch


def loader(**methods):
    """The solution with other methods."""
    return type("Continuing", (Continuing,), methods)


def never(self):
    yield from DataLoader.__iter__(self)


def counts_after_the_yield(self):
    skip, self.skip = self.skip, 0
    for number, batch in enumerate(DataLoader.__iter__(self)):
        if number >= skip:
            yield batch
        self.done = number + 1


def counts_from_zero(self):
    skip, self.skip, self.done = self.skip, 0, 0
    for batch in islice(DataLoader.__iter__(self), skip, None):
        self.done += 1
        yield batch


def never_counts_anew(self):
    skip, self.skip = self.skip, 0
    for batch in islice(DataLoader.__iter__(self), skip, None):
        self.done += 1
        yield batch


def counts_on(self):
    """The count of a loop that ended early stays for the next one."""
    if self.skip:
        self.done = self.skip
    yield from never_counts_anew(self)


def forgets_at_the_end(self):
    for number, batch in enumerate(DataLoader.__iter__(self), start=1):
        self.done = number
        if number > self.skip:
            yield batch
    self.skip = 0


def skips_always(self):
    for number, batch in enumerate(DataLoader.__iter__(self), start=1):
        self.done = number
        if number > self.skip:
            yield batch


def skips_what_is_done(self):
    for number, batch in enumerate(DataLoader.__iter__(self), start=1):
        if number > self.done:
            self.done = number
            yield batch


def skips_one_more(self):
    skip, self.skip = self.skip, 0
    for number, batch in enumerate(DataLoader.__iter__(self)):
        self.done = number + 1
        if not skip or number > skip:
            yield batch


def sequential(self):
    skip, self.skip = self.skip, 0
    for number in range(skip, 7):
        self.done = number + 1
        yield [self.dataset.tensors[0][2 * number : 2 * number + 2]]


def samples_done(self):
    return {"done": self.done % len(self) * self.batch_size}


def skip_samples(self, state):
    self.skip = state["done"] // self.batch_size


def test_continuing():
    for right in (Continuing, Islice, BeginsTheNextEpoch, Nested, Iterator):
        for _ in range(3):  # how many batches are done is drawn anew
            assert check.continuing(right), right
    explains(
        check.continuing,
        (loader(state_dict=lambda self: ...), "still returns `...`"),
        (loader(state_dict=lambda self: None), "returned None"),
        (loader(state_dict=lambda self: {"done": Continuing}), "cannot be read with weights_only=True"),
        (loader(state_dict=lambda self: {"done": np.int64(self.done % 7)}), "`int(...)` makes one"),
        (loader(state_dict=lambda self: self.done % 7), "Return a dictionary"),
        (loader(state_dict=lambda self: [self.done % 7]), "Return a dictionary"),
        (loader(state_dict=samples_done, load_state_dict=skip_samples), "Count batches, not samples"),
        (loader(__iter__=counts_on), "After a loop that ended early"),
        (loader(__iter__=forgets_at_the_end), "In the epoch after the one that was resumed"),
        (DataLoader, "has no method `state_dict`"),
        (loader(load_state_dict=None), "has no method `load_state_dict`"),
        (Continuing([1, 2]), "is not a class that inherits from DataLoader"),
        (list, "is not a class that inherits from DataLoader"),
        (loader(load_state_dict=lambda self, state: None), "It begins anew. Does"),
        (loader(__iter__=never), "does `__iter__` skip"),
        (loader(__iter__=counts_after_the_yield), "count before it"),
        (loader(__iter__=counts_from_zero), "count the batches that were skipped"),
        (loader(__iter__=never_counts_anew), "When a loader that has continued is saved again"),
        (loader(__iter__=skips_always), "In the epoch after the one that was resumed"),
        (loader(__iter__=skips_what_is_done), "it begins with batch 0"),
        (loader(__iter__=skips_one_more), "It leaves one out"),
        (loader(__iter__=sequential), "Keep the sampler's order"),
        (loader(state_dict=lambda self: {"done": 3 if self.done else 0}), "the loader should begin with batch"),
        (loader(state_dict=lambda self: {"done": self.done}), "Once the last batch of an epoch is done"),
        (loader(__len__=lambda self: 7 - self.skip), "`len` changes after a restart"),
        (loader(__len__=lambda self: 12), "is 12. Leave it alone"),
        (loader(__init__=lambda self, data, batch_size: None), "TypeError"),
    )
