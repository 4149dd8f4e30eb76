"""The checks of lesson 10: solutions pass, typical mistakes are explained, nothing raises."""

import pytest
import run_all
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector
from torch.utils.data import DataLoader

from helpers.exercises import lesson10 as check
from tests.check_answers import explains, survives_strange_answers, told

LACKS = run_all.missing(run_all.FOLDER / "10_frameworks.ipynb")
needs_frameworks = pytest.mark.skipif(bool(LACKS), reason=LACKS)


def test_no_answer_makes_a_check_raise():
    assert survives_strange_answers(check.converted, check.back, check.images_per_step)


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
        (loop(zero=1), "The first of two batches has no effect"),
        (loop(zero=None), "never set to zero"),
        (lambda samples: left, "Compare the seed"),
        (loop(seed=1), "Compare the seed"),
        (loop(rate=0.2), "the learning rate"),
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
        (lightning_job(warm_up=lambda step: check.rate(2 * step)), "takes two steps per batch"),
        (lambda samples: left, "Compare the seed"),
        (lambda samples: type(left)(), "No Trainer has trained the module"),
        (loop(), "Return the LightningModule"),
    )


@needs_frameworks
def test_back_is_what_lightning_computes():
    module = lightning_job(warm_up=None, accumulate_grad_batches=2)(check.samples())
    told(check.back(lambda samples: lightning_job()(samples).net), "calls Lightning's Trainer")
    net = loop()(check.samples())
    torch.testing.assert_close(parameters_to_vector(module.parameters()), parameters_to_vector(net.parameters()))
