"""The checks of lesson 00: the solutions pass, stubs and the usual mistakes are explained, nothing raises."""

import sys

import pytest
import torch
from torch import nn
from virtual_gpus import virtual_gpus

from helpers.exercises import lesson00 as check
from tests.check_answers import Hostile

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

CHECKS = ("total_memory", "run_on", "budget", "pieces")


@pytest.fixture(autouse=True)
def gpus():
    with virtual_gpus(4, memory="16 GiB") as devices:
        yield devices


def run_on(gpu, net, images):
    return net.to(gpu)(images.to(gpu))


def budget(net):
    return 4 * parameter_bytes(net) / 2**20


def parameter_bytes(net):
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())


@pytest.mark.parametrize(
    "name, answer",
    [
        ("total_memory", 64),
        ("total_memory", 64.0),
        ("run_on", run_on),
        ("run_on", lambda gpu, net, images: net.cuda(gpu)(images.cuda(gpu))),
        ("budget", budget),
        ("pieces", [4, 4, 4, 2]),
        ("pieces", (4, 4, 4, 2)),
        ("pieces", torch.tensor([4, 4, 4, 2])),
    ],
)
def test_right_answers_pass(name, answer):
    verdict = getattr(check, name)(answer)
    assert verdict, verdict.text
    assert verdict.text.startswith("correct: ")


@pytest.mark.parametrize(
    "answer, reason",
    [
        (..., "still holds ..."),
        (16, "that is one GPU, and there are 4"),
        (64 * 2**30, "those are bytes: give GiB"),
        (64 * 1024, "those are MiB: give GiB"),
        (68.719, "a GiB has 1,073,741,824"),
        ("64 GiB", "write it without quotes"),
        (60, "it is a little too small"),
    ],
)
def test_wrong_totals_are_explained(answer, reason):
    assert reason in check.total_memory(answer).text


@pytest.mark.parametrize(
    "answer, reason",
    [
        (lambda gpu, net, images: ..., "still returns ..., because your answer is missing"),
        (lambda gpu, net, images: None, "has no `return` with a value yet"),
        (lambda gpu, net, images: net(images), "still on the CPU"),
        (lambda gpu, net, images: net.to(gpu)(images), "Expected all tensors to be on the same device"),
        (lambda gpu, net, images: net(images.to(gpu)), "Expected all tensors to be on the same device"),
        (lambda gpu, net, images: net.to("cuda:0")(images.to("cuda:0")), "another GPU"),
        (lambda gpu, net, images: run_on(gpu, net, images).cpu(), "still on the CPU"),
        (lambda gpu, net, images: images.to(gpu), "the shape is (5, 1, 4, 4)"),
        (lambda gpu, net, images: run_on(gpu, net, images).softmax(1), "values differ"),
        (lambda gpu, net, images: net.to(gpu), "it returned a Sequential"),
        (lambda net, images: net(images), "takes 2 positional arguments but 3 were given"),
    ],
)
def test_wrong_ways_to_run_on_a_gpu_are_explained(answer, reason):
    assert reason in check.run_on(answer).text


@pytest.mark.parametrize(
    "answer, reason",
    [
        (lambda net: ..., "still returns ..., because your answer is missing"),
        (lambda net: None, "has no `return` with a value yet"),
        (lambda net: budget(net) / 4, "the gradients and Adam's state were left out"),
        (lambda net: budget(net) / 2, "Adam's state were left out"),
        (lambda net: budget(net) * 3 / 4, "the gradients were left out"),
        (lambda net: budget(net) * 2**20, "those are bytes: give MiB"),
        (lambda net: budget(net) / 1024, "those are GiB: give MiB"),
        (lambda net: 29.04, "too large"),
        (lambda net: f"{budget(net)} MiB", "is text"),
    ],
)
def test_wrong_budgets_are_explained(answer, reason):
    assert reason in check.budget(answer).text


def test_a_budget_for_the_first_net_only_is_not_enough():
    only_the_first = budget(nn.Linear(1000, 500))
    assert not check.budget(lambda net: only_the_first)


@pytest.mark.parametrize(
    "answer, reason",
    [
        ([...] * 4, "still holds ..."),
        ([3.5] * 4, "an image stays in one piece"),
        ([4, 4, 3, 3], "until none are left for the last GPU"),
        ([5, 3, 3, 3], "until none are left for the last GPU"),
        ([2, 4, 4, 4], "their order is not"),
        ([4, 4, 4, 4], "the batch has 14"),
        ([14], "there are 4 GPUs"),
        (["3"] * 4, "is no number of images"),
        (3, "a list of 4 numbers"),
        (float("nan"), "a list of 4 numbers"),
        ([float("nan")] * 4, "an image stays in one piece"),
    ],
)
def test_wrong_pieces_are_explained(answer, reason):
    assert reason in check.pieces(answer).text


STRANGE = [
    None, ..., "", "text", b"bytes", True, -1, 10**400, 1e400, float("nan"), 3 + 4j, [], {}, set(), object,
    len, torch, torch.ones(3), torch.ones((), device="meta"), nn.Identity(), nn.Linear(2, 2), Hostile,
    lambda *_: sys.exit(3), lambda *_: 1 / 0, lambda *_: Hostile(), lambda *_: torch.ones(3, device="meta"),
    "cuda:99", Hostile(), [Hostile()] * 4, [10**400, 0.5, 0, 0], [10**400, 1, -(10**400), 9],
]  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("place", range(len(STRANGE)))
def test_nothing_raises_and_nothing_strange_is_correct(name, place):
    verdict = getattr(check, name)(STRANGE[place])
    assert not verdict
    assert verdict.text.startswith("not yet: ") and ", because " in verdict.text


@pytest.mark.parametrize("name, answer", [("total_memory", 64), ("run_on", run_on), ("budget", budget)])
def test_without_gpus_the_first_cell_is_named(name, answer, gpus):
    with virtual_gpus(1):
        assert "the first cell, `gpus = use_gpus(4)`, has not been run" in getattr(check, name)(answer).text


def test_checks_leave_no_memory_behind():
    for name, answer in (
        ("total_memory", 64),
        ("run_on", run_on),
        ("budget", budget),
        ("pieces", [4, 4, 4, 2]),
    ):
        assert getattr(check, name)(answer)
    assert [torch.cuda.memory_allocated(index) for index in range(4)] == [0] * 4
