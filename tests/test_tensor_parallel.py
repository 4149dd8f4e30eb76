"""Linear layers cut in columns and rows: the numbers of one GPU, and one all-reduce each way."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.launch import RankError, launch
from helpers.tensor_parallel import ColumnLinear, RowLinear


def layers(bias):
    torch.manual_seed(0)
    return nn.Linear(6, 12, bias=bias), nn.Linear(12, 5, bias=bias), torch.randn(4, 3, 6)


def in_rank(rank, bias):
    up, down, x = layers(bias)
    up, down, x = ColumnLinear(up).to(rank), RowLinear(down).to(rank), x.to(rank).requires_grad_()
    calls = []
    real = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (calls.append(tensor.numel()), real(tensor, *args, **kwargs))[1]
    try:
        y = down(torch.relu(up(x)))
        forward = list(calls)
        y.square().sum().backward()
    finally:
        dist.all_reduce = real
    found = {"y": y, "x": x.grad, "up": up.weight.grad, "down": down.weight.grad}
    found |= {"up bias": up.bias.grad, "down bias": down.bias.grad} if bias else {}
    return {name: value.detach() for name, value in found.items()}, forward, calls


@pytest.mark.parametrize(("ranks", "bias"), [(2, True), (3, False), (1, True)])
def test_the_numbers_of_one_gpu(ranks, bias):
    up, down, x = layers(bias)
    x.requires_grad_()
    y = down(torch.relu(up(x)))
    y.square().sum().backward()
    with virtual_gpus(4):
        found = launch(in_rank, bias, ranks=ranks, show=False)
    for values, forward, calls in found:
        torch.testing.assert_close(values["y"], y.detach())
        torch.testing.assert_close(values["x"], x.grad)
        assert forward == [4 * 3 * 5] and calls == [4 * 3 * 5, 4 * 3 * 6]
    for name, layer, dim in (("up", up, 0), ("down", down, 1)):
        whole = torch.cat([values[name] for values, _, _ in found], dim)
        torch.testing.assert_close(whole, layer.weight.grad)
    if bias:
        torch.testing.assert_close(torch.cat([values["up bias"] for values, _, _ in found]), up.bias.grad)
        for values, _, _ in found:
            torch.testing.assert_close(values["down bias"], down.bias.grad)


@pytest.mark.parametrize(("layer", "said"), [(ColumnLinear, "7 outputs"), (RowLinear, "5 inputs")])
def test_what_ranks_cannot_share_is_refused(layer, said):
    with virtual_gpus(2), pytest.raises(RankError, match=f"{said} cannot be shared equally by 2 ranks"):
        launch(lambda rank: layer(nn.Linear(5, 7)), ranks=2, show=False)
