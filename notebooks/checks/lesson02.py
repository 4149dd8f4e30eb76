"""Checks of lesson 02, DataParallel."""

import gc
from collections.abc import Mapping
from functools import partial
from numbers import Integral
from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from helpers.data import random_tokens
from helpers.measure import GiB, MiB, fits
from helpers.models import LLAMA_1B, Llama
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, require, show
from notebooks.checks.gpus import need_empty_rtx_4090s, need_gpus

VOCABULARY = LLAMA_1B["vocabulary"]


class _WithoutPyTorch(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        used = "use a tensor of PyTorch" if name.startswith("__") else f"call PyTorch's `{name}`"
        raise NotYet(f"You {used}. Compute the sizes from the two numbers alone.")


@exercise
def piece_sizes(answer):
    """Exercise 1: `answer(batch, gpus)` must list how many samples each GPU gets, as torch.nn.parallel.scatter cuts."""
    draw = Random()
    drawn = [(draw.randrange(1, 200), draw.randrange(2, 17)) for _ in range(5)]
    for batch, gpus in ((64, 4), (10, 4), (3, 4), (9, 4), (34, 8), (1, 2), (100, 7), *drawn):
        right = [len(piece) for piece in torch.zeros(batch).chunk(gpus)]
        with _WithoutPyTorch():
            found = call(answer, batch, gpus)
        said = f"piece_sizes({batch}, {gpus}) is {show(found)}."
        integers = isinstance(found, list) and all(isinstance(size, Integral) and size is not True for size in found)
        require(integers, said, "Return a list of integers.")
        require(sum(found) == batch, said, f"These are {sum(found)} samples, and the batch has {batch}.")
        require(0 not in found, said, "A GPU that gets no samples has no entry in the list.")
        alike = "DataParallel makes all pieces of the same size, except the last, which may be smaller."
        require(len(set(found[:-1])) <= 1 and found[-1] <= found[0], said, alike)
        require(found == right, said, f"The first piece has {right[0]} samples. Which rule gives that?")
    return "These are the pieces of scatter, even where some GPUs get no samples."


@exercise
def without_prefix(answer):
    """Exercise 2: `answer(state_dict)` must give the state dict with the keys of the net that is not wrapped."""
    nested = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.ModuleDict({"module": nn.Linear(2, 1)})})
    only = nn.ModuleDict({"module": nn.Linear(2, 2)})  # its own keys look like those of a wrapped net
    similar = nn.ModuleDict({"modules_": nn.Linear(2, 2)})
    for net in (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(_place()), nested, similar, only):
        right = {key: value.clone() for key, value in net.state_dict().items()}
        cases = {"wrapped": nn.DataParallel(net).state_dict()} | ({} if net is only else {"plain": net.state_dict()})
        for kind, given in cases.items():
            keys = list(given)
            found = call(answer, given)
            unchanged = list(given) == keys and all(map(torch.equal, net.state_dict().values(), right.values()))
            changed = "Your function changes the state dict that it is given, and its owner may still need it."
            require(unchanged, changed, "Return a new dict.")
            require(isinstance(found, Mapping), f"{show(found)} is not a dict. Return a state dict.")
            became = f"The keys of a {kind} net, {keys}, became {list(found)}."
            why = "Remove only what DataParallel has added, once. A net may have a layer that is called `module`."
            require(set(found) == set(right), became, why)
            for key, value in right.items():
                was, became = (_kind(each) for each in (value, found[key]))
                require(was == became, f"The value of `{key}` was {was} and became {became}. Change only the keys.")
                other = f"The value of `{key}` has other numbers, or another shape, than before."
                require(torch.equal(found[key], value), other, "Change only the keys.")
    return "`load_state_dict` takes it, and a layer that is itself called `module` keeps its name."


def _kind(value: object) -> str:
    return f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _place() -> torch.device:
    """A GPU if there is one that keeps values."""
    values = torch.cuda.device_count() and torch.zeros((), device="cuda:0").item() == 0
    return torch.device("cuda:0" if values else "cpu")


@exercise
def peak(answer):
    """Exercise 3: `answer(batch, vocabulary)` must give the GiB at GPU 0's peak: Llama, 1,024 tokens, four GPUs."""
    gpus = need_empty_rtx_4090s(4)
    call(answer, 4, VOCABULARY)  # what raises is told before the jobs run
    print("The check trains the model with two batches and vocabularies. This takes some seconds.")
    for batch, vocabulary in _cases():
        case = f"With {batch} sequences and {vocabulary:,} tokens, "
        found, right = call(answer, batch, vocabulary), _peak(gpus, batch, vocabulary)
        compare.memory(found, right, "GiB", rel=0.01, mistakes=_wrong_peaks(batch, vocabulary), case=case)
    return "The recipe agrees with the measured peaks, whichever of the two moments is the higher one."


def _cases() -> list[tuple[int, int]]:
    """A batch and a vocabulary with which the loss makes the peak, and others with which the gradients make it.

    In these ranges, different mistakes give different numbers.
    """
    draw = Random()
    return [(12, 1024 * draw.randrange(106, 126)), (4, 1024 * draw.randrange(4, 11))]


def _wrong_peaks(batch: int, vocabulary: int) -> dict[float, str]:
    """By bytes, what follows from the mistakes that are made, and the words for each."""
    parameters = 2 * (973_146_112 + 2048 * vocabulary)
    outputs = 2 * batch * 1024 * vocabulary
    piece = 1.43 * GiB * batch / 4
    loss, end = piece + 3 * outputs, 2 * parameters + 10 * MiB
    right = max(loss, end)
    both = "is the other one of the two moments. Take the larger one."
    thrice = "has {} of the outputs' size. How many does GPU 0 hold when the loss goes backward?"
    wrong = {
        3 * parameters + min(loss, end): both,
        3 * parameters + loss + end: "is the sum of the two moments. They are not at the same time: take the larger.",
        parameters + right: "leaves out AdamW's state.",
        4 * parameters + right: "has one part of the parameters' size too many. Gradients count at one moment only.",
        3 * parameters + max(3 * outputs, end): "leaves out the activations of GPU 0's own piece.",
        6 * parameters + max(piece + 6 * outputs, 2 * end): "counts 4 bytes per number. bfloat16 has 2.",
        right: "leaves out the parameters and AdamW's state, which are always there.",
    }
    if loss > end:  # else the gradients could be what is missing
        lacks = "lacks one part of the parameters' size: the parameters, or one of AdamW's two states."
        wrong[2 * parameters + right] = lacks
    for count, name in ((1, "one tensor"), (2, "two tensors"), (4, "four tensors")):
        wrong[3 * parameters + max(piece + count * outputs, end)] = thrice.format(name)
    wrong[3 * parameters + max(piece + 3 * outputs / 4, end)] = (
        "has only GPU 0's own piece of the outputs. All outputs are gathered on GPU 0."
    )
    wrong[3 * parameters + max(4 * piece + 3 * outputs, end)] = (
        "has the activations of all sequences. GPU 0 keeps those of its own quarter."
    )
    wrong[3 * parameters + max(loss, parameters)] = (
        "has the gradients once. At the end of backward, GPU 0 holds those of its own piece and the sum."
    )
    near = 3 * parameters + right
    return {value: words for value, words in wrong.items() if abs(value / near - 1) > 0.01}


@exercise
def largest(answer):
    """Exercise 4: the largest batch, in fours, of 512 tokens on four RTX 4090 with the outputs on GPU 1."""
    gpus = need_empty_rtx_4090s(4)
    print("The check trains with your batch and with a larger one. This takes some seconds.")
    compare.largest(answer, 4, lambda batch: _fits(gpus, batch), "GPU 1 holds the outputs of all sequences.")
    return "With 4 sequences more, GPU 1 runs out of memory."


def _train(gpus: list[torch.device], batch: int, length: int, vocabulary: int, output_device: int) -> int:
    """Bytes of GPU 0 at the peak of the second of two training steps."""
    with gpus[0]:
        model = Llama(**LLAMA_1B | {"vocabulary": vocabulary}).to(torch.bfloat16)
    network = nn.DataParallel(model, gpus, output_device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(gpus[0])
        tokens, labels = random_tokens(batch, length, vocabulary)
        optimizer.zero_grad()
        cross_entropy(network(tokens).flatten(0, 1), labels.flatten().to(gpus[output_device])).backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated(gpus[0])


def _peak(gpus: list[torch.device], batch: int, vocabulary: int) -> int:
    gc.collect()
    return _train(gpus, batch, 1024, vocabulary, output_device=0)


def _fits(gpus: list[torch.device], batch: int) -> bool:
    return fits(_train, gpus, batch, 512, VOCABULARY, output_device=1)


@exercise
def damaged(answer):
    """Exercise 5: `answer(gpus, send)` must list the ways (source, target) on which `send` copies wrong numbers."""
    gpus = need_gpus(4, values=True)[:4]
    for broken in (set(), {(1, 2)}, {(0, 3), (3, 0), (2, 1)}):
        with _Links() as links:
            found = call(answer, gpus, partial(_send, broken, links))
        some = isinstance(found, list | tuple | set | frozenset)
        require(some, f"{show(found)} is not a list. Return a list of pairs (source, target).")
        pairs = {_pair(each) for each in found}
        around = (
            f"You copy from {links.used[0]} without `send`, over a link that may be broken, too." if links.used else ""
        )
        require(not links.used, around, "Use `send`, and compare on the CPU.")
        require(not pairs or {pair[::-1] for pair in pairs} != broken or pairs == broken, _TURNED)
        unharmed = f"Copies arrive without damage on {len(pairs - broken)} of the {len(pairs)} pairs in your list."
        back = "Each direction is a pair of its own. Test it without the way back."
        other = any(pair[::-1] in broken for pair in pairs - broken)
        require(pairs <= broken, unharmed, back if other else "Compare what arrived with what was sent.")
        missing = f"{len(broken - pairs)} of {len(broken)} damaged pairs are missing from your list."
        tested = "Test both directions between every two GPUs, with `send`, and with numbers other than zero."
        require(broken <= pairs, missing, tested)
    return "The list has every damaged pair, and no other."


_TURNED = "Your pairs are the wrong way round. The first of a pair is the GPU on which the tensor was before."


class _Links(TorchFunctionMode):
    """`used` names the two GPUs of each copy between GPUs in the block, by `.to`, `.cuda` or `copy_`."""

    def __init__(self):
        super().__init__()
        self.used: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_cuda and not function.__name__.endswith("_like"):
            given = [each.device for each in args if isinstance(each, Tensor) and each.is_cuda]
            self.used += [f"{device} to {result.device}" for device in given if device != result.device]
        return result


def _send(broken: set[tuple[int, int]], links: _Links, tensor: Tensor, device: torch.device) -> Tensor:
    require(tensor.is_cuda, "You send a tensor that is on the CPU, which tests no link between GPUs.", "Move it first.")
    own = len(links.used)
    there = tensor.to(device)
    del links.used[own:]  # this copy is the one that is asked for
    return torch.zeros_like(there) if (tensor.device.index, there.device.index) in broken else there


def _pair(found: object) -> tuple[int, int]:
    pair = isinstance(found, tuple | list) and len(found) == 2
    indices = tuple(gpu.index if isinstance(gpu, torch.device) else gpu for gpu in found) if pair else ()
    whole = pair and all(type(index) is int for index in indices)
    require(whole, f"{show(found)} is not a pair (source, target) of two of `gpus`.")
    return indices
