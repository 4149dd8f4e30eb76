"""A memory budget of the learner's own net, held against what is measured, part by part."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.exercises import compare
from helpers.exercises.core import call, exercise, not_yet, require, show
from helpers.exercises.measuring import current_gpu
from helpers.measure import MiB

PARTS = ("parameters", "gradients", "optimizer", "activations", "workspaces", "context")
OFF = 0.1  # how far off a guess may be
WHY = {
    "parameters": "they are four bytes for each float32, buffers included",
    "gradients": "there is one number for each parameter",
    "optimizer": "Adam keeps two numbers for each parameter",
    "activations": "it is what each layer keeps for backward, and the logits' softmax, times the batch",
    "workspaces": "cuBLAS takes 32 MiB on Hopper cards and 8 MiB on most others",
    "context": "it is what the card lacks beside PyTorch's part: mem_get_info's total - free - memory_reserved",
}


@exercise
def budget(make_net: Callable[[], nn.Module], batch: Tensor, answer: Mapping[str, float]):
    """`answer`, MiB by part, must be within 10 % of the second step of `make_net()` under Adam on `batch`.

    Says of each part how far off it is, and holds the sum against the card at the step's peak.
    """
    gpu = current_gpu()
    require(isinstance(batch, Tensor), f"{show(batch)} is no tensor", "one batch of inputs for your net is asked for")
    require(isinstance(answer, Mapping), f"{show(answer)} is no dict", "MiB for each part are asked for, by name")
    asked = f"these are asked for: {', '.join(PARTS)}"
    require(set(answer) == set(PARTS), f"the parts are {show(list(answer))}", asked)
    guesses = {name: compare.number(answer[name], float(answer[name])) * MiB for name in PARTS}
    parts, peak = _parts(make_net, batch, gpu)
    shares = {name: guesses[name] / max(parts[name], 1) for name in PARTS}
    wrong = [name for name in PARTS if abs(shares[name] - 1) > OFF]
    if wrong:
        not_yet(
            "; ".join(f"{name} {shares[name]:.2f} times what was measured" for name in wrong), _why(wrong[0], shares)
        )
    found = ", ".join(_off(name, parts, shares) for name in PARTS)
    held = f"{(peak + parts['context']) / MiB:,.1f} MiB were taken at the peak"
    return f"measured, and how far off you were: {found}; {sum(guesses.values()) / MiB:,.1f} MiB together, and {held}"


def _off(name: str, parts: Mapping[str, int], shares: Mapping[str, float]) -> str:
    percent = round(100 * (shares[name] - 1))
    return (
        f"{name} {parts[name] / MiB:,.1f} MiB ({percent:+d} %)" if percent else f"{name} {parts[name] / MiB:,.1f} MiB"
    )


def _why(wrong: str, shares: Mapping[str, float]) -> str:
    if 0.2 < shares[wrong] < 0.3 and wrong in PARTS[:3]:
        return "that looks like a count of numbers: each float32 takes four bytes"
    return WHY[wrong]


def _parts(make_net: Callable[[], nn.Module], batch: Tensor, gpu: torch.device) -> tuple[dict[str, int], int]:
    """Bytes of each part, as what is requested grows by, and the most that was allocated in a second step."""
    now, found = _requested, {"workspaces": _workspaces(gpu), "context": _context(gpu)}
    start = now(gpu)
    net = call(make_net)
    require(isinstance(net, nn.Module), f"{show(net)} is no net", "a function that makes an nn.Module is asked for")
    net.to(gpu)
    found["parameters"] = now(gpu) - start
    x, adam = batch.to(gpu), torch.optim.Adam(net.parameters())
    _loss(net, x).backward()
    before = now(gpu)
    adam.step()
    found["optimizer"] = now(gpu) - before
    torch.cuda.reset_peak_memory_stats(gpu)
    adam.zero_grad()
    before = now(gpu)
    loss = _loss(net, x)
    found["activations"] = now(gpu) - before
    loss.backward()
    del loss
    found["gradients"] = now(gpu) - before
    adam.step()
    return found, torch.cuda.max_memory_allocated(gpu)


def _requested(gpu: torch.device) -> int:
    """Bytes that tensors asked for: their blocks are up to 1 MiB larger, as chance has it."""
    return torch.cuda.memory_stats(gpu)["requested_bytes.all.current"]


def _workspaces(gpu: torch.device) -> int:
    """What cuBLAS takes for a matrix product. PyTorch before 2.15 keeps it from the first one on: it is given back."""
    torch._C._cuda_clearCublasWorkspaces()
    small = torch.zeros(16, 16, device=gpu)
    before = torch.cuda.memory_allocated(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    small @ small
    return torch.cuda.max_memory_allocated(gpu) - before


def _context(gpu: torch.device) -> int:
    """What is taken on the card and not by PyTorch: this process's context, and other programs."""
    free, total = torch.cuda.mem_get_info(gpu)
    return total - free - torch.cuda.memory_reserved(gpu)


def _loss(net: nn.Module, x: Tensor) -> Tensor:
    """The cross entropy of a net with two-dimensional outputs, the mean of any other's."""
    out = net(x)
    if out.dim() != 2:
        return out.float().mean()
    return cross_entropy(out, torch.zeros(len(out), dtype=torch.long, device=out.device))
