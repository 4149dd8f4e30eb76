"""The memory of the article's BERT on every GPU, computed in milliseconds instead of run: a formula.

    for gpu in step_memory(Job(gpus=4, batch=200, method="DataParallel")):
        print(gpu.index, gpu.peak, gpu.moment, gpu.at_peak)

What is computed is the peak of `torch.cuda.max_memory_allocated` in the second training step and later ones (from then
on the optimizer has its state) of a loop that calls `zero_grad()` before the forward pass and keeps no name for the
logits, as `train.loops` does. With n tokens on a GPU (its samples x length T), hidden size h, vocabulary V and L
layers:

    W = 4 (2 V h + V + T h + L (12 h^2 + 13 h) + 2 h)   parameters, float32
    K = L (17.5 A + 2.25 S) + 2 A                       activations kept for backward (A, S: `bert_step`)
    Z = 4 n V                                           logits

A GPU's peak is the largest of these moments; P is W and the optimizer's state (0, 1 or 2 times W) on the first GPU,
under nn.DataParallel on the others a copy of W while it is needed:

    the loss                P + K + 3 Z: log-softmax, the gradient that reaches it, the gradient that leaves it. Under
                            DataParallel one GPU gathers the outputs and has the Z of the whole batch; in the cures each
                            GPU has its own Z
    the head's backward     P + K + Z + A + 4 V h (the head's gradient) + partial sums of the bias, about Z / 8
    the layers' backward    P + what is left of K + gradients so far + a few A and S
    adding up gradients     P + 2 W: gradients and their sums, on the first GPU of several
    the optimizer's step    P + W, and with Adam W once more

Not one of them is fitted to runs. `Walk` goes through the moments tensor by tensor, with workspaces and the rounding of
PyTorch's allocator (`cards`); tests hold the result against shapes-only runs on virtual GPUs, within 3 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from helpers.show.widgets.bert_sizes import Sizes
from helpers.show.widgets.bert_step import Walk
from helpers.show.widgets.cards import Card, card
from helpers.show.widgets.ledger import KINDS, Ledger

__all__ = ["KINDS", "METHODS", "OPTIMIZERS", "GPUMemory", "Job", "step_memory"]

METHODS = ("one GPU", "DataParallel", "output_device=1", "loss in forward", "parallel loss")
OPTIMIZERS = {"SGD": 0, "SGD with momentum": 1, "Adam": 2, "AdamW": 2}  # states per parameter
_GATHERS = ("DataParallel", "output_device=1")


@dataclass(frozen=True)
class Job:
    """A training step of `helpers.models.Bert` (float32, attention scores stored). `batch`: samples of all GPUs.

    Raises ValueError for what cannot be trained, and says what to do.
    """

    gpus: int = 4
    batch: int = 200
    length: int = 163
    vocabulary: int = 30_000
    hidden: int = 256
    layers: int = 8
    optimizer: str = "Adam"
    method: str = "DataParallel"
    heads: int = 8
    card: Card = field(default_factory=card)

    def __post_init__(self):
        for name in ("gpus", "batch", "length", "vocabulary", "hidden", "layers", "heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number of at least 1.")
        if self.hidden % self.heads:
            near = max(1, round(self.hidden / self.heads)) * self.heads
            raise ValueError(
                f"A hidden size of {self.hidden} cannot be shared among {self.heads} heads: take a multiple of "
                f"{self.heads}, such as {near}."
            )
        for name, value, known in (("optimizer", self.optimizer, OPTIMIZERS), ("method", self.method, METHODS)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}.")
        if self.method == "output_device=1" and self.gpus == 1:
            raise ValueError("output_device=1 is the second GPU, and there is one: take 2 GPUs or another method.")

    @property
    def alone(self) -> bool:
        """Whether one GPU does all the work."""
        return self.gpus == 1 or self.method == "one GPU"

    @property
    def samples(self) -> list[int]:
        """Samples on each GPU: pieces of equal size, but for the last, as torch.chunk cuts them."""
        size = self.batch if self.alone else -(-self.batch // self.gpus)
        return [max(0, min(size, self.batch - place * size)) for place in range(self.gpus)]

    @property
    def gathers(self) -> int | None:
        """The GPU that gathers the outputs and computes the loss of all; None where each has its own."""
        return None if self.alone or self.method not in _GATHERS else int(self.method == "output_device=1")


@dataclass(frozen=True)
class GPUMemory:
    """One GPU: `samples` it works on, its `peak` in bytes, the `moment` of that, and what is held then, by kind."""

    index: int
    samples: int
    peak: int
    moment: str
    at_peak: dict[str, int]


def step_memory(job: Job) -> list[GPUMemory]:
    """The peak of every GPU in a training step, from the second on."""
    sizes = Sizes(job.vocabulary, job.hidden, job.layers, job.heads, job.length)
    known: dict[tuple, Ledger] = {}  # GPUs with the same work are computed once
    found = []
    for index, samples in enumerate(job.samples):
        work = samples, index == 0, index == job.gathers
        if work not in known:
            known[work] = _walk(job, sizes, *work)
        ledger = known[work]
        found.append(GPUMemory(index, samples, ledger.peak, ledger.moment, ledger.at_peak))
    return found


def _walk(job: Job, sizes: Sizes, samples: int, first: bool, gathers: bool) -> Ledger:
    """A later step on one GPU: `first` has the parameters, `gathers` the outputs of all."""
    ledger = Ledger()
    if first:
        own(ledger, sizes)
        own_states(ledger, job, sizes)
    if samples:
        ledger.take("other", workspaces=job.card.kept_workspaces)
    step(ledger, job, sizes, samples, first, gathers)
    return ledger


def own(ledger: Ledger, sizes: Sizes) -> None:
    """The parameters of the model."""
    for name, size in sizes.parameters.items():
        ledger.take("parameters", **{name: size})


def own_states(ledger: Ledger, job: Job, sizes: Sizes) -> None:
    """The optimizer's state, which its first step makes."""
    for name, size in sizes.parameters.items():
        for state in range(OPTIMIZERS[job.optimizer]):
            ledger.take("optimizer state", **{f"{name} state {state}": size})


def step(ledger: Ledger, job: Job, sizes: Sizes, samples: int, first: bool, gathers: bool, states: bool = True) -> None:
    """A training step on one GPU, from zero_grad() to the optimizer; `states`: the optimizer has its own already."""
    ledger.give_all("gradients")
    if samples:
        ledger.take("other", inputs=8 * samples * job.length)
        walk = Walk(ledger, sizes, job.card, samples, copied=not first)
        walk.forward()
        _lose(ledger, walk, job, gathers)
        walk.backward()
        if not job.alone:
            _add_up(ledger, sizes, first)
        ledger.give("inputs")
    elif gathers:
        _log_softmax(ledger, job.batch * job.length, job.vocabulary)
        ledger.give("logits'")
    ledger.doing = "the optimizer's step"
    if first and not states:
        own_states(ledger, job, sizes)
    if first and job.optimizer.startswith("Adam"):
        ledger.pass_through(*sizes.parameters.values())


def _lose(ledger: Ledger, walk: Walk, job: Job, gathers: bool) -> None:
    """From the logits to their gradient. The replicas are gone by then, but where the loss is a part of them."""
    if job.method != "loss in forward":
        walk.drop_unneeded_copies()
    if job.gathers is None:
        _log_softmax(ledger, walk.tokens, job.vocabulary, walk)
        return
    ledger.give("logits")
    if gathers:
        whole = job.batch * job.length
        ledger.take("logits", logits=4 * whole * job.vocabulary)
        _log_softmax(ledger, whole, job.vocabulary)
    else:
        ledger.take("logits", **{"logits'": walk.logits})


def _log_softmax(ledger: Ledger, tokens: int, vocabulary: int, walk: Walk | None = None) -> None:
    """log-softmax instead of the logits, the gradient that reaches it, and the one that leaves it and stays."""
    size = 4 * tokens * vocabulary
    ledger.doing = "the loss"
    ledger.take("logits", log_softmax=size)
    ledger.give(*(["logits"] if ledger.holds("logits") else []))
    if walk is not None:
        walk.drop_unneeded_copies()
    ledger.take("logits", **{"log_softmax'": size})
    ledger.take("logits", **{"logits'": size})
    ledger.give("log_softmax", "log_softmax'")


def _add_up(ledger: Ledger, sizes: Sizes, first: bool) -> None:
    """The replicas' gradients in flat buffers, and their sums on the first GPU."""
    ledger.doing = "adding up the gradients"
    before = []  # a buffer goes when the next one is there
    for place, names in enumerate(sizes.added_up):
        size, flat = sum(sizes.parameters[name] for name in names), f"flat {place}"
        if len(names) > 1:  # a single gradient is sent as it is
            ledger.take("other", **{flat: size})
        ledger.give(*before)
        before = [flat] if len(names) > 1 else []
        if first:
            ledger.take("gradients", **{f"sum {place}": size})
    ledger.give(*before, *(f"{name}'" for name in sizes.parameters))
