"""The known limits that `help("virtual_gpus")` lists: what each says is so, or another test shows it."""

import re
from pathlib import Path

import pytest
import torch
import virtual_gpus as package
from measuring import recorded, rows_of_features, seconds, table
from virtual_gpus import virtual_gpus

LISTED = re.split(r"^- ", package.__doc__.partition("Known limits")[2], flags=re.MULTILINE)[1:]
LISTED = [" ".join(text.split()) for text in LISTED]


def work_on_the_cpu_takes_no_time():
    assert recorded(lambda: torch.randn(100, 100) @ torch.randn(100, 100)).spans == []


def numbers_do_not_wait():
    x = torch.ones(1000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        y = x + 1
    assert y.sum().item() == 2000


def numbers_are_the_cpu_s():
    torch.manual_seed(0)
    assert torch.equal(torch.rand(8, device="cuda").cpu(), torch.rand(8))
    assert len(torch.cuda.get_rng_state()) == 16


def cpu_autocast_casts_gpu_tensors():
    x = torch.ones(4, 4, device="cuda")
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16


def to_the_cpu(x):
    return x.cpu()


def scripts_have_the_cpu_s_operators():
    assert torch.jit.script(to_the_cpu)(torch.ones(2, device="cuda")).device.type == "cuda"


def products_in_a_byte_take_those_of_two():
    x, half = (torch.ones(2048, 2048, device="cuda", dtype=kind) for kind in (torch.int8, torch.float16))
    product = seconds(lambda: half @ half)
    assert seconds(lambda: torch._int_mm(x, x)) == pytest.approx(product, rel=1e-9) and product > 1e-5
    assert seconds(lambda: torch.linalg.cholesky_ex(torch.eye(2048, device="cuda"))) < product


SHOWN = {
    "Products in fp8 and int8": products_in_a_byte_take_those_of_two,
    "The clock counts only": work_on_the_cpu_takes_no_time,
    "Numbers never depend on streams": numbers_do_not_wait,
    "Random numbers that are drawn": numbers_are_the_cpu_s,
    '`torch.autocast("cpu")` also casts': cpu_autocast_casts_gpu_tensors,
    "TorchScript programs": scripts_have_the_cpu_s_operators,
    "An index out of range": lambda: pytest.raises(IndexError, lambda: torch.ones(3).cuda()[torch.tensor([5]).cuda()]),
}
ELSEWHERE = table("limits") | dict(rows_of_features("limits"))


def test_every_known_limit_has_its_test():
    unknown = [text for text in LISTED if not any(text.startswith(begin) for begin in (*SHOWN, *ELSEWHERE))]
    gone = [begin for begin in (*SHOWN, *ELSEWHERE) if not any(text.startswith(begin) for text in LISTED)]
    assert unknown == gone == []
    for place in ELSEWHERE.values():
        name, _, test = place.partition("::")
        path = next(Path(__file__).parent.rglob(name), Path(name)) if test else Path(__file__).parents[1] / name
        assert path.exists() and (not test or f"def {test}" in path.read_text(encoding="utf-8")), place


@pytest.mark.parametrize("limit", SHOWN)
def test_a_known_limit(limit):
    with virtual_gpus(1):
        SHOWN[limit]()
