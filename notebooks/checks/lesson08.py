"""Checks of lesson 08, sharding. Two of them start ranks of their own, and the last one runs one rank of 256."""

from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from numbers import Integral, Real
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from helpers.gpus import modelled_gpus
from helpers.measure import record_training
from helpers.models import LLAMA_70B, Llama
from helpers.parallel import RankError
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, given, require, show
from notebooks.checks.gpus import in_ranks, need_gpus, need_plan, plain
from notebooks.checks.par import Score, compare_with_par

RANKS = 2  # of exercises 3 and 4
_MODELS = ((8_030_261_248, 64), (1_000_000, 2), (70_553_706_496, 1024), (365_375_290, 1))  # parameters, ranks


def _shares(ranks: int, stage: int) -> list[float]:
    """Bytes of each parameter that a rank holds: the parameter, its gradient and Adam's states."""
    return [count / ranks if place >= 3 - stage else count for place, count in enumerate((4, 4, 8))]


def _in_other_units(size: float) -> dict[float, str]:
    return {size / unit: f"is in {name}. Return bytes." for name, unit in compare.UNITS.items() if unit > 1}


@exercise
def held(answer):
    """Exercise 1: `answer(parameters, ranks, stage)` gives the bytes that a rank holds, stage 0 for DDP."""
    for parameters, ranks in _MODELS:
        for stage in (1, 2, 3, 0):  # under DDP, two mistakes give the same number
            kept, shards = _shares(ranks, 0), _shares(ranks, stage)
            right = parameters * sum(shards)
            mistakes = {
                right * ranks: "is what all ranks hold together. Return what one of them holds.",
                parameters * (sum(shards) + 4): "counts buckets. Leave them out.",
                parameters
                * (sum(shards) - shards[2] / 2): "counts one number of Adam for each parameter. It keeps two.",
                parameters * (sum(shards) - shards[1]): "lacks the gradients.",
                parameters * sum(_shares(ranks, 1)): "is what ZeRO-1 holds.",
                parameters * sum(_shares(ranks, 2)): "is what ZeRO-2 holds.",
                parameters * sum(kept): "is what DDP holds. In this stage, something is in shards.",
                parameters * sum(kept) / ranks: "has everything in shards. That is stage 3.",
                right / 4: "counts a byte for each number. A float32 takes four bytes.",
                **_in_other_units(right),
            }
            case = f"In stage {stage}, with {parameters:,} parameters on {ranks} ranks, "
            compare.number(call(answer, parameters, ranks, stage), right, "bytes", 1e-3, mistakes, case)
    return "On 64 ranks, ZeRO-3 holds a 64th of what DDP holds."


@exercise
def sent(answer):
    """Exercise 2: `answer(parameters, ranks, stage, micro_batches)` gives the bytes that a rank sends in a step."""
    for parameters, ranks in _MODELS:
        for micro_batches in (1, 4):
            for stage in range(4):
                times = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[stage]
                each = 4 * parameters * (ranks - 1) / ranks
                batches = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
                case = f"In stage {stage}, with {parameters:,} parameters, {ranks} ranks and {batches}, "
                value = compare.as_number(call(answer, parameters, ranks, stage, micro_batches))
                if ranks == 1:
                    require(value == 0, f"{case}{value:,.0f} bytes are sent. A single rank has nobody to send to.")
                    continue
                once = {1: 2, 2: 2, 3: 3}.get(stage, 2)
                mistakes = {
                    times * each * ranks: "is what all ranks send together. Return what one of them sends.",
                    times * 4 * parameters: "lacks the factor (n - 1) / n. A rank keeps its own piece.",
                    times * each / 4: "counts a byte for each number. A float32 takes four bytes.",
                    once * each: "is right for one micro-batch. What is repeated for each of them?",
                    once * micro_batches * each: "repeats for each micro-batch what is done once in a step.",
                    **_in_other_units(times * each),
                }
                if stage == 0:
                    mistakes[each] = "is one half of an all-reduce. Which is the other one?"
                if stage == 3:
                    mistakes[(2 * micro_batches + 1) * each] = "reduces the gradients only once in a step."
                    mistakes[2 * micro_batches * each] = "gathers only once for each micro-batch."
                    mistakes[2 * each] = "is what DDP sends. In this stage, more is sent."
                compare.number(value, times * each, "bytes", 1e-3, mistakes, case)
    return "Accumulating gradients costs DDP and ZeRO-1 nothing, and makes ZeRO-3 send everything again."


class Gated(nn.Module):
    """Exercise 3: (N, 16) -> (N, 16). Two layers side by side, and one after their product."""

    def __init__(self):
        super().__init__()
        self.open, self.content, self.close = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.close(self.open(x).sigmoid() * self.content(x))


def _divide_in_rank(rank: int, plan: dict) -> tuple[dict, str, int, str]:
    """For each weight the local share, what is wrong with the output, how many collectives ran, and an error."""
    torch.manual_seed(0)
    model, x = Gated().to("cuda"), torch.linspace(-1, 1, 8 * 16, device="cuda").view(8, 16)
    expected = model(x)
    try:
        parallelize_module(model, init_device_mesh("cuda", (RANKS,)), plan)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return {}, "", 0, str(error).partition("\n")[0].rstrip(".!")
    shares = {}
    for name in _LAYERS:
        weight = getattr(model, name).weight
        shares[name] = weight.to_local().numel() / weight.numel() if isinstance(weight, DTensor) else 1.0
    if max(shares.values()) == 1:
        return shares, "", 0, ""  # the shapes may not fit
    try:
        with CommDebugMode() as traffic:
            found = model(x)
    except (RuntimeError, ValueError) as error:
        return shares, "", 0, str(error).partition("\n")[0].rstrip(".!")
    found = found.to_local() if isinstance(found, DTensor) else found  # what this rank has
    fault = ""
    if found.shape != expected.shape:
        fault = f"A rank returns outputs of the shape {tuple(found.shape)}, and one GPU {tuple(expected.shape)}."
    elif not torch.allclose(found, expected, atol=1e-4):
        fault = "The output is not that of one GPU."
    return shares, fault, traffic.get_total_counts(), ""


_LAYERS = ("open", "content", "close")


@exercise
def plan(answer):
    """Exercise 3: `answer` is a plan of `parallelize_module` that divides `Gated` with one collective."""
    named = isinstance(answer, Mapping) and all(isinstance(name, str) for name in answer)
    require(named, f"{show(answer)} is not a plan. Give a dict from names of layers to styles.")
    for name, style in answer.items():
        known = any(fnmatch(layer, name) for layer in _LAYERS)
        require(known, f"The model has no layer {name!r}. Its layers are {', '.join(_LAYERS)}.")
        kind = type(style).__name__ if not isinstance(style, type) else f"class {style.__name__}"
        why = "Give an object, with brackets, for example ColwiseParallel()."
        require(isinstance(style, ParallelStyle), f"The style of {name!r} is a {kind}.", why)
    for layer in _LAYERS:
        keys = [name for name in answer if fnmatch(layer, name)]
        require(len(keys) < 2, f"{' and '.join(map(repr, keys))} both match {layer!r}.", "Give each layer one style.")
    need_gpus(RANKS, values=True)
    shares, fault, collectives, error = in_ranks(_divide_in_rank, dict(answer), RANKS, timeout=30)[0]
    for name, share in shares.items():
        why = "Every rank should have half of it."
        require(share < 1, f"Each rank has the whole weight of {name!r}.", why)
    what = f"A layer gets an input that does not fit its weight: {error}."
    why = "ColwiseParallel leaves its output divided and expects a whole input, RowwiseParallel expects a divided one."
    require(not error, what, f"{why} What does `close` get from `open` and `content`?")
    why = "Which layer's columns belong to which layer's rows, and is the sum complete on each rank?"
    require(not fault, fault, why)
    what = f"The forward pass calls {collectives} collectives, and one is enough."
    require(collectives <= 1, what, "What one layer leaves divided, the next one can take divided.")
    return "Two layers by columns, one by rows, and one collective."


STEPS, LAYERS, SEED = 3, 2, 1  # of exercise 4


def sentences(seed: int = 0) -> Tensor:
    """8 sentences of 17 words. The check of exercise 4 takes others than the lesson shows."""
    return torch.randint(0, 512, (8, 17), generator=torch.Generator().manual_seed(seed))


_taken: list[int] = []  # sentences of each step of this rank


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """Exercise 4: one training step on these sentences, on the GPU. Returns the loss, a tensor without a graph."""
    _taken.append(len(tokens))
    optimizer.zero_grad()
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def alone(tokens: Tensor, log) -> nn.Module:
    """What exercise 4 starts from: training on one GPU."""
    torch.manual_seed(0)
    model = Llama(layers=LAYERS).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        log(one_step(model, optimizer, tokens.to("cuda")).item())
    return model


def _train_in_rank(rank: int, answer) -> tuple:
    """The learner's function: logged losses, sentences of each step, groups of blocks, share of parameters, weights."""
    torch.manual_seed(1000 + rank)  # so that a missing torch.manual_seed(0) shows
    _taken.clear()
    logged: list = []
    model = answer(rank, sentences(SEED), logged.append)
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)):
        return type(model).__name__, [], [], None, 1.0, {}
    if not isinstance(model, Llama):
        return plain(model), [], [], None, 1.0, {}
    blocks = [id(fully_shard.state(block)) for block in model.blocks if isinstance(block, FSDPModule)]
    parts = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    share = sum(part.numel() for part in parts) / sum(each.numel() for each in model.parameters())
    full = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().cpu().float()
        for name, each in model.named_parameters()
    }
    dist.barrier()
    losses = [float(loss) if isinstance(loss, Real) else show(loss) for loss in logged]
    return None, losses, list(_taken), blocks, share, full


@exercise
def sharded(answer):
    """Exercise 4: `answer(rank, tokens, log)` trains as `alone` does, on two ranks with `fully_shard`."""
    need_gpus(RANKS, values=True)
    losses: list[float] = []
    expected = {name: each.detach().cpu() for name, each in alone(sentences(SEED), losses.append).named_parameters()}
    all_wrapped = "Call fully_shard on each block, then on the model."
    try:
        results = in_ranks(_train_in_rank, answer, RANKS, timeout=30)
    except RankError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            what = "Some parameters are DTensors and others are not, or one was used while it was not gathered."
            raise NotYet(what, f"Did you forget `fully_shard(model)`? {all_wrapped}") from error
        if "Invariant encountered" in str(error):
            what = "The model was wrapped before its blocks, so that its root group has taken their parameters."
            raise NotYet(what, all_wrapped) from error
        if "does not support containers" in str(error):
            what = "`fully_shard` got a list of modules, which has no forward pass of its own."
            raise NotYet(what, all_wrapped) from error
        raise
    others = {
        "DistributedDataParallel": "keeps the whole model on each rank.",
        "FullyShardedDataParallel": "is the class of FSDP1. `fully_shard` changes the model itself.",
    }
    for returned, _, _, blocks, *_ in results:
        if returned in others:
            raise NotYet(f"It returned a {returned}, which {others[returned]}", all_wrapped)
        if blocks is None:
            raise NotYet(f"It returned {given(returned, answer)}. Return the model.")
    _, logged, taken, blocks, share, found = results[0]
    shapes = {name: each.shape for name, each in found.items()}
    right_shapes = {name: each.shape for name, each in expected.items()}
    require(shapes == right_shapes, "The parameters have other shapes than in `alone`.", "Use the model of `alone`.")
    require(share < 0.55, f"Rank 0 holds {share:.0%} of all parameters, and its shard is half.", all_wrapped)
    what = f"{len(blocks)} of the {LAYERS} blocks are wrapped. The rest is gathered at once."
    require(len(blocks) == LAYERS, what, all_wrapped)
    what = "The blocks were wrapped in one call, so they are gathered at once."
    require(len(set(blocks)) == LAYERS, what, "Call fully_shard once for each block.")
    require(len(taken) > 0, "Rank 0 did not call `check.one_step`.", "Use it for each step, as `alone` does.")
    half = [len(sentences(SEED)) // RANKS] * STEPS
    what = f"In its steps, rank 0 trained on {taken} sentences."
    require(taken == half, what, f"It should take {STEPS} steps, each with {half[0]} of the 8 sentences.")
    torch.manual_seed(0)
    start = dict(Llama(layers=LAYERS).named_parameters())
    if all(torch.equal(found[name], start[name]) for name in found):
        raise NotYet("The weights have not changed.", "Which parameters does the optimizer have, old or new ones?")
    same = all(torch.allclose(found[name], expected[name], atol=1e-3) for name in expected)
    why = "Compare seed, optimizer, number format and the sentences of each rank with those of `alone`. Use `tokens`."
    require(same, "The weights are not those of one GPU.", why)
    counts = [len(each[1]) for each in results]
    what = f"Ranks 0 and 1 logged {counts[0]} and {counts[1]} losses."
    require(counts == [STEPS, 0], what, f"Rank 0 should log {STEPS}, one per step, and rank 1 none.")
    for number, (value, right) in enumerate(zip(logged, losses, strict=True)):
        why = "Log a number: `.item()` turns a tensor into one."
        require(not isinstance(value, str), f"The loss of step {number} is {value}.", why)
        near = compare.as_number(value)
        what = f"The loss of step {number} is {near:.4f}, and it should be {right:.4f}."
        require(abs(near - right) < 1e-3 * right, what, "Log the mean over the ranks, not rank 0's loss or a sum.")
    return "The weights and the losses are those of one GPU, and each rank holds half."


# ---- 5. par ----------------------------------------------------------------------------------------------------------

GPUS, SEQUENCES, LENGTH, BLOCKS = 256, 128, 8192, LLAMA_70B["layers"]
MOST = 72 * 2**30  # bytes at the peak
NAIVE = {"tensor": 8, "sequences": 1, "recompute": 80}
PAR = {"tensor": 2, "sequences": 1, "recompute": 48}


class _PartlyRecomputing(Llama):
    """The first `recompute` blocks keep only their inputs."""

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number < self.recompute else block(x)
        return self.norm(x)


def _plan() -> dict[str, ParallelStyle]:
    """That of section 4."""
    by_tokens, whole = Shard(1), Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=by_tokens),
        "blocks.*.norm?": SequenceParallel(),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=by_tokens, use_local_output=False),
    }
    for part, first, last in (
        ("attention", ("query", "key", "value"), "out"),
        ("feed_forward", ("gate", "up"), "down"),
    ):
        inputs = PrepareModuleInput(input_layouts=by_tokens, desired_input_layouts=whole)
        styles[f"blocks.*.{part}"] = inputs
        styles |= {f"blocks.*.{part}.{name}": ColwiseParallel() for name in first}
        styles[f"blocks.*.{part}.{last}"] = RowwiseParallel(output_layouts=by_tokens)
    return styles


class _Measured(NamedTuple):
    peak: float
    seconds: float


@cache
def _micro_batch(tensor: int, sequences: int, recomputing: int, keeping: int) -> _Measured:
    """Peak and time of rank 0 for one micro-batch and the optimizer's step, of a model with so many blocks."""
    groups = GPUS // tensor
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    network = {"network": "InfiniBand NDR", "adapters": 8}
    with modelled_gpus(8, "H100", rank=0, world_size=GPUS, **network), record_training() as recorded:
        mesh = init_device_mesh("cuda", (groups, tensor), mesh_dim_names=("data", "tensor"))
        with torch.device("meta"):
            model = _PartlyRecomputing(**(LLAMA_70B | {"layers": recomputing + keeping}))
        model.recompute = recomputing
        parallelize_module(model, mesh["tensor"], _plan())
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["data"], mp_policy=precision)
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(sequences, LENGTH, dtype=torch.long, device="cuda")
        for _ in range(2):
            if groups * sequences == SEQUENCES:  # otherwise there are gradients of earlier micro-batches
                optimizer.zero_grad()
            with loss_parallel():
                cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
            optimizer.step()
    report = recorded.report()
    return _Measured(report.peak_bytes, report.step_seconds)


def score(tensor: int, sequences: int, recompute: int) -> Score:
    """Of all blocks and a whole step, extrapolated: each block of a kind adds the same memory and the same time."""
    few, recomputing, keeping = (_micro_batch(tensor, sequences, *blocks) for blocks in ((2, 2), (4, 2), (2, 4)))
    peak, seconds = (
        start + (more - start) / 2 * (recompute - 2) + (most - start) / 2 * (BLOCKS - recompute - 2)
        for start, more, most in zip(few, recomputing, keeping, strict=True)
    )
    return Score(int(peak), seconds * SEQUENCES / (GPUS // tensor * sequences))


@exercise
def job(answer):
    """Exercise 5: `answer` is a dict with the arguments of `score`. It must fit, and its time is compared with par."""
    need_plan(answer, NAIVE, NAIVE)
    possible = {"tensor": (1, 2, 4, 8), "sequences": range(1, SEQUENCES + 1), "recompute": range(BLOCKS + 1)}
    said = {
        "tensor": "1, 2, 4 or 8",
        "sequences": f"an integer from 1 to {SEQUENCES}",
        "recompute": f"an integer from 0 to {BLOCKS}",
    }
    for key, value in answer.items():
        known = isinstance(value, Integral) and not isinstance(value, bool) and value in possible[key]
        require(known, f"The plan says {show(value)} for {key}.", f"It should be {said[key]}.")
    answer = {key: int(value) for key, value in answer.items()}
    groups = GPUS // answer["tensor"]
    together = groups * answer["sequences"]
    what = f"{groups} groups with {answer['sequences']} each train on {together} sequences at once,"
    why = f"and a step has only {SEQUENCES}. Let more GPUs divide each layer, or give a group fewer sequences."
    require(together <= SEQUENCES, what, why)
    require(SEQUENCES % together == 0, what, f"which does not divide the {SEQUENCES} of a step.")
    yours = score(**answer)
    what = f"The peak is {yours.peak / 2**30:.1f} GiB, and {MOST / 2**30:.0f} GiB are allowed."
    why = "Recompute more blocks, divide each layer among more GPUs, or train on fewer sequences at once."
    require(yours.peak <= MOST, what, why)
    par = Score(None, score(**PAR).seconds)  # only the time counts
    text = compare_with_par("08 70 billion on 256", naive=score(**NAIVE), par=par, you=yours, unit_note="modelled")
    return f"{text} That is {SEQUENCES * LENGTH / yours.seconds:,.0f} tokens per second."
