"""The known limits that `help("virtual_gpus")` lists: what each says is so, or another test shows it."""

import re
from pathlib import Path

import pytest
import torch
import virtual_gpus as package
from measuring import recorded
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


def seconds(work):
    return recorded(work).busy_seconds(0)


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
ELSEWHERE = {
    "Kernels on different streams": "test_clock.py::test_streams_of_one_gpu_share",
    "Tensors that are made under FakeTensorMode": "test_shapes_only.py::test_fake_tensors_are_nobody_s_memory",
    "torch.compile returns PyTorch's own objects": "test_compile.py::test_what_is_returned_is_pytorch_s",
    "`torch.use_deterministic_algorithms(True)`": "test_errors.py::test_operators_without_a_deterministic",
    "Without cuDNN": "test_cuda_convolutions.py::test_memory_and_time_know_the_same_kernels_and",
    "Batch norm without cuDNN": "test_cuda_operators.py::test_a_batch_norm_takes_the_memory_and_the_time",
    "Products and convolutions of whole": "test_errors.py::test_what_cuda_refuses_and_the_cpu_computes",
    "Operators on lists": "test_every_operator.py::test_an_operator_on_lists",
    "The inference fast path": "test_correctness.py::an_encoder_in_evaluation",
    "Programs do not run faster": "benchmarks/step_cost.py",
    "Where the host is the bottleneck": "benchmarks/clock.py",
    "In torch.distributed, collectives and messages": "test_collective_times.py::test_each_collective_of_pytorch",
    "In torch.profiler": "test_profiler.py::test_the_trace_has_a_process_for_each_gpu",
    "Memory is that of CUDA's operators": "test_reference_memory.py::test_",
    "Processes see each other's memory": "test_shared_cards.py::test_programs_that_were_started_apart",
    "PYTORCH_CUDA_ALLOC_CONF": "test_shared_cards.py::test_the_environment_is_read_at_the_first_touch",
    "A block that is marked with `record_stream`": "test_shared_cards.py::test_a_block_stays_as_long_as",
    "`shapes_only` keeps no values": "test_shapes_only.py::test_what_needs_values_says_so",
    "What is not modelled raises": "test_public_names.py::test_every_refusal_is_in_the_list",
    "Gloo carries the messages": "test_nccl.py::test_collectives_of_nccl",
    "`torch.distributed.fsdp.fully_shard`": "test_fully_shard.py::test_each_rank_holds_its_share",
    "One rank of many": "test_one_rank.py::test_the_other_ranks_hold_what_this_one_holds",
    "With torch.distributed.autograd": "test_rpc.py::test_a_backward_pass_over_two_processes",
    "Programs that are started with `subprocess`": "test_children.py::test_nobody_inherits_who_was_not_asked_for",
    "A thread that was running before": "test_threads.py::test_an_old_thread_joins_when_it_first_names_a_gpu",
    "When virtual GPUs are switched off": "test_shapes_only.py::test_a_tensor_of_gpus_that_are_off_is_named",
    "`torch.save` and": "test_correctness.py::test_",
}


def test_every_known_limit_has_its_test():
    unknown = [text for text in LISTED if not any(text.startswith(begin) for begin in (*SHOWN, *ELSEWHERE))]
    gone = [begin for begin in (*SHOWN, *ELSEWHERE) if not any(text.startswith(begin) for text in LISTED)]
    assert unknown == gone == []
    for place in ELSEWHERE.values():
        name, _, test = place.partition("::")
        path = Path(__file__).parent / name if test else Path(__file__).parents[1] / name
        assert path.exists() and (not test or f"def {test}" in path.read_text(encoding="utf-8")), place


@pytest.mark.parametrize("limit", SHOWN)
def test_a_known_limit(limit):
    with virtual_gpus(1):
        SHOWN[limit]()
