"""Checks of lesson 11, long sequences and experts. The last one starts ranks of its own."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.models import FeedForward
from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, given, require, show
from notebooks.checks.gpus import in_ranks, need_gpus, plain

_WIDTH, _TOKENS = 16, 24  # of exercise 4: tokens on each rank


@exercise
def work(answer):
    """Exercise 1: `answer(rank, ranks, balanced)` gives the share of the allowed pairs that a rank computes."""
    for ranks in (4, 1, 2, 8):
        for rank in sorted(range(ranks), key=lambda rank: rank != 1):  # first a case where no two mistakes are equal
            for balanced in (False, True):
                right = 1 / ranks if balanced else (2 * rank + 1) / ranks**2
                mistakes = {
                    1 / ranks: "is an equal share. In order, later tokens have more keys.",
                    (2 * rank + 1) / ranks**2: "is the share without balancing. Each rank has a head and a tail.",
                    (rank + 1) / (ranks * (ranks + 1) / 2): "counts all pairs of a piece with itself. Count half.",
                    2 * rank / (ranks * (ranks - 1) or 1): "leaves out the pairs of a piece with itself. Count half.",
                    right * 100: "is in percent. Return a share from 0 to 1.",
                    right * ranks: "is relative to an equal share. Return the share of all pairs.",
                    (2 * (ranks - 1 - rank) + 1) / ranks**2: "is the share of the rank at the other end.",
                }
                how = "with head and tail" if balanced else "in order"
                case = f"For rank {rank} of {ranks}, {how}, "
                share = compare.as_number(call(answer, rank, ranks, balanced))
                if abs(share - right) > 0.0051:  # two decimals are enough
                    compare.number(share, right, "", 1e-3, mistakes, case)
    return "In order, the last of 8 ranks has 15 times the work of the first."


def _blocks(largest: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs and logarithms of five blocks of keys, and the output of all of them."""
    query, key = torch.randn(6, 8, dtype=torch.double), torch.randn(20, 8, dtype=torch.double)
    value = torch.randn(20, 3, dtype=torch.double)
    scores = query @ key.T
    scores = scores * (largest / scores.max())
    expected = scores.softmax(dim=-1) @ value
    parts = list(zip(scores.split((4, 1, 7, 5, 3), dim=1), value.split((4, 1, 7, 5, 3)), strict=True))
    outputs = [(score.softmax(dim=-1) @ rows).float() for score, rows in parts]
    return outputs, [score.logsumexp(dim=-1, keepdim=True).float() for score, _ in parts], expected.float()


def _refuse(found: Tensor, mistake: Tensor, *sentences: str) -> None:
    same = found.shape == mistake.shape and torch.allclose(found.detach().cpu().float(), mistake, rtol=1e-3, atol=1e-5)
    require(not same, *sentences)


@exercise
def combine(answer):
    """Exercise 2: `answer(outputs, log_sums)` gives the output for all keys of the blocks."""
    for largest in (2.0, 2000.0):
        outputs, log_sums, expected = _blocks(largest)
        given = [part.clone() for part in (*outputs, *log_sums)]
        found = call(answer, list(outputs), list(log_sums))
        require(isinstance(found, Tensor), f"{show(found)} is not a tensor. Return the output for all keys.")
        changed = any(not torch.equal(*pair) for pair in zip(given, (*outputs, *log_sums), strict=True))
        require(not changed, "The function changes its arguments. Leave them as they are.")
        finite = found.dtype.is_floating_point and bool(found.isfinite().all())
        largest_first = "Subtract each query's largest logarithm over the blocks before you take exponentials."
        require(finite, "Some outputs are not finite.", largest_first)
        if largest < 100:
            sums = torch.stack(log_sums)
            _refuse(
                found, torch.stack(outputs).mean(dim=0), "This is the mean of the blocks. Weight them by their sums."
            )
            _refuse(found, torch.stack(outputs).sum(dim=0), "This is the sum of the blocks. Weight them by their sums.")
            by_logarithms = (sums * torch.stack(outputs)).sum(dim=0) / sums.sum(dim=0)
            _refuse(found, by_logarithms, "The weights are the logarithms. They must be the sums themselves.")
        compare.tensor(found, expected, rel=1e-3, absolute=1e-5)
    return "The weights are the softmax of the logarithms, which PyTorch computes without large exponentials."


@exercise
def sent(answer):
    """Exercise 3: `answer(ranks, tokens, kv_heads, head_width)` gives the bytes that a rank sends."""
    for ranks, tokens, heads, width in ((8, 131_072, 8, 128), (2, 4096, 4, 64), (64, 2**20, 8, 128), (1, 8192, 8, 128)):
        block = 2 * tokens // ranks * heads * width * 2
        right = (ranks - 1) * block
        case = f"For {ranks} ranks, {tokens:,} tokens and {heads} heads of {width}, "
        value = compare.as_number(call(answer, ranks, tokens, heads, width))
        if ranks == 1:
            require(value == 0, f"{case}{value:,.0f} bytes are sent. A single rank has nobody to send to.")
            continue
        mistakes = {
            ranks * block: "counts a step too many. The last block is not passed on.",
            block: "is one step. A block is passed on in every step but the last.",
            right / 2: "counts one of keys and values, or a byte for each number.",
            right * 2: "counts four bytes for each number, or the backward pass, too. A bfloat16 takes two.",
            right * ranks: "counts the whole sequence. A block has tokens / ranks of it, or one rank sends this much.",
            right / 4: "counts a byte for each number, and only keys or only values.",
            right / heads: "counts one head.",
        }
        compare.memory(value, right, "bytes", 1e-3, mistakes, case)
    return "With many ranks, a rank sends nearly all keys and values once, however many ranks there are."


def _two_each(x: Tensor, router: nn.Module, experts: nn.ModuleList, count: int = 2) -> Tensor:
    """On one GPU: every token's `count` best experts, each times its probability."""
    probability, chosen = router(x).softmax(dim=-1).topk(count, dim=-1)
    out = x
    for number, expert in enumerate(experts):
        weight = (probability * (chosen == number)).sum(dim=-1, keepdim=True)
        out = out + weight * expert(x)
    return out


def _in_rank(rank: int, answer) -> tuple:
    """What is wrong on this rank, or "": with outputs and gradients that one GPU has."""
    experts = dist.get_world_size()
    torch.manual_seed(0)
    router = nn.Linear(_WIDTH, experts, bias=False).to("cuda")
    mine = nn.ModuleList(FeedForward(_WIDTH, 2 * _WIDTH) for _ in range(experts)).to("cuda")
    x, last = torch.randn(experts * _TOKENS, _WIDTH).to("cuda"), router.weight.detach()[-1]
    x[:_TOKENS] -= 5 * last / last.square().sum()  # so that rank 0 sends nothing to the last expert
    x.requires_grad_()
    whole = _two_each(x, router, mine)
    whole.square().sum().backward()
    expected = mine[rank].up.weight.grad.clone(), router.weight.grad.clone(), x.grad.chunk(experts)[rank]
    x = x.detach()
    with torch.no_grad():
        two, chosen = router(x).softmax(dim=-1).topk(2, dim=-1)
        scaled = x + (whole - x) / two.sum(dim=-1, keepdim=True)
        mistakes = {"once": _two_each(x, router, mine, 1), "alone": whole - x, "scaled": scaled}
    mistakes = {name: wrong.chunk(experts)[rank].detach() for name, wrong in mistakes.items()}
    router.zero_grad(), mine.zero_grad()
    tokens = x.chunk(experts)[rank].clone().requires_grad_()
    computed, needed = [], int((chosen == rank).sum())  # rows of the expert, not counting empty ones
    mine[rank].register_forward_pre_hook(lambda _, inputs: computed.append(int(inputs[0].any(dim=-1).sum())))
    found = answer(tokens, router, mine[rank])
    if not isinstance(found, Tensor):
        return ("returns", plain(found))
    right = whole.chunk(experts)[rank].detach()
    if found.shape != right.shape:
        return ("shape", tuple(found.shape))
    if (found.dtype, found.device) != (right.dtype, right.device):
        return ("kind", f"{found.dtype} on {found.device}")
    if not _equal(found, right):
        return (next((name for name, wrong in mistakes.items() if _equal(found, wrong)), "values"), None)
    if not found.requires_grad:
        return ("graph", None)
    if sum(computed) > needed:
        return ("rows", (sum(computed), needed))
    found.square().sum().backward()
    gradients = [mine[rank].up.weight.grad, router.weight.grad, tokens.grad]
    if any(gradient is None for gradient in gradients):
        return ("graph", None)
    gradients[1] = gradients[1].clone()
    dist.all_reduce(gradients[1])
    for name, gradient, wanted in zip(("expert", "router", "tokens"), gradients, expected, strict=True):
        if not torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-4):
            return (f"gradient of the {name}", None)
    return ("", None)


def _equal(found: Tensor, other: Tensor) -> bool:
    return torch.allclose(found, other, rtol=1e-4, atol=1e-5)


_WRONG = {
    "once": "This sends each token to one expert only. Take the two largest probabilities.",
    "alone": "The output lacks the tokens themselves. Add x.",
    "scaled": "The two probabilities were divided by their sum. Take them as they are.",
    "values": "The output differs from one GPU. Does each row come back to its token, and get its own probability?",
    "graph": "Nothing can be trained through the output. Use AllToAll, and no detach().",
}


@exercise
def top_two(answer):
    """Exercise 4: `answer(x, router, expert)` is the mixture with two experts for each token, on every rank."""
    need_gpus(4, values=True)
    require(callable(answer), f"{show(answer)} is not a function. Write top_two(x, router, expert).")
    for what, value in in_ranks(_in_rank, answer, ranks=4, timeout=30):
        if what == "returns":
            raise NotYet(f"The function returns {given(value, answer)}. Return the tensor with the new tokens.")
        if what == "shape":
            raise NotYet(f"The output has the shape {value} instead of {(_TOKENS, _WIDTH)}.")
        if what == "kind":
            raise NotYet(f"The output is {value}. It should have the dtype and the GPU of x.")
        if what == "rows":
            raise NotYet("An expert computes {} rows, and only {} choose it. Send it no others.".format(*value))
        if what:
            raise NotYet(_WRONG.get(what, f"The {what} differs from one GPU."))
    return "With two experts, each token travels twice, and so do its gradients."
