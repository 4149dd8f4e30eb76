"""The memory explorer: sliders for a training of the article's BERT, and the memory of every GPU at once.

    from helpers.show.widgets import explore_memory
    explore_memory(gpus=4, batch=200, method="DataParallel", memory="12 GiB")

The figures come from the formula of `bert_memory`: nothing is run, no GPU is needed, and whatever GPUs are on
stay as they are. A slider's event changes the picture within some hundredths of a second.
"""

from __future__ import annotations

from helpers.show.widgets.bert_fits import judge
from helpers.show.widgets.bert_memory import METHODS, OPTIMIZERS, Job, step_memory
from helpers.show.widgets.cards import card
from helpers.show.widgets.explorer_picture import draw
from helpers.show.widgets.panel import Panel, choice, slider
from helpers.show.widgets.scene import Scene

SLIDERS = {  # name -> label, smallest, largest, step
    "gpus": ("GPUs", 1, 8, 1),
    "batch": ("batch", 8, 512, 4),
    "length": ("tokens per sample", 32, 512, 1),
    "vocabulary": ("vocabulary", 2_000, 100_000, 1_000),
    "hidden": ("hidden size", 128, 1024, 64),
    "layers": ("layers", 1, 24, 1),
}


class MemoryExplorer(Panel):
    """The panel. `controls`: name -> widget, as the arguments of `explore_memory`; `words`: what the picture shows."""

    def __init__(self, job: Job):
        self._card = job.card
        sliders = {name: slider(label, getattr(job, name), *ends) for name, (label, *ends) in SLIDERS.items()}
        choices = {"optimizer": OPTIMIZERS, "method": METHODS}
        super().__init__(sliders | {name: choice(name, each, getattr(job, name)) for name, each in choices.items()})

    @property
    def job(self) -> Job:
        """What the controls say. Raises ValueError where that cannot be trained."""
        return Job(card=self._card, **self.chosen)

    def _look(self, **chosen) -> tuple[str, Scene]:
        job = self.job
        gpus = step_memory(job)
        scene = draw(job, gpus, judge(job, gpus))
        return scene.words, scene


def explore_memory(
    gpus: int = 4,
    batch: int = 200,
    length: int = 163,
    vocabulary: int = 30_000,
    hidden: int = 256,
    layers: int = 8,
    optimizer: str = "Adam",
    method: str = "DataParallel",
    kind: str = "TITAN Xp",
    memory: int | str | None = None,
) -> MemoryExplorer:
    """Sliders for the article's BERT (8 heads, float32, dropout; attention scores stored); end a cell with it.

    batch      samples of all GPUs together; `length` tokens each
    optimizer  "SGD", "SGD with momentum", "Adam" or "AdamW"
    method     "one GPU", "DataParallel", "output_device=1" (DataParallel that gathers on GPU 1), "loss in forward" or
               "parallel loss"
    kind       of all GPUs, as for `use_gpus`; `memory`: of each, the kind's own if None ("12 GiB", or bytes)

    Shown is the peak that PyTorch allocates from the second step on, against what the card has without CUDA's context.
    A value beyond a slider's end moves the end. Raises ValueError for a job that cannot be trained, and says what to
    do; sliders that ask for such a job show the same sentence.
    """
    return MemoryExplorer(
        Job(gpus, batch, length, vocabulary, hidden, layers, optimizer, method, card=card(kind, memory))
    )


__all__ = ["SLIDERS", "MemoryExplorer", "explore_memory"]
