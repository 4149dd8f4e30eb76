"""PyTorch's context parallelism, in which blocks of keys travel: equal to one GPU, and alike in every mode."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.nn.attention import sdpa_kernel
from virtual_gpus import record_timeline, virtual_gpus

CASES = [
    ("EFFICIENT_ATTENTION", "alltoall", 1e-6),
    ("FLASH_ATTENTION", "allgather", 0.02),
    ("CUDNN_ATTENTION", "alltoall", 0.02),
]


def attend(backend, inputs):
    inputs = [part.detach().requires_grad_() for part in inputs]
    with sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):  # a name: cloudpickle takes no SDPBackend
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        out.float().square().sum().backward()
    return [out.detach(), *(part.grad for part in inputs)]


def in_a_ring(rank, backend, method, values=False):
    """Bytes, seconds, and the largest difference from one GPU, as a share of the largest number."""
    dtype = torch.float32 if backend == "EFFICIENT_ATTENTION" else torch.bfloat16
    kv_heads = 4 if dtype == torch.float32 else 2
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 128, 16, dtype=dtype).cuda() for heads in (4, kv_heads, kv_heads)]
    whole, mesh = attend(backend, inputs), dist.device_mesh.init_device_mesh("cuda", (2,))
    set_rotate_method(method)
    torch.cuda.reset_peak_memory_stats()
    with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2] * 3), record_timeline() as timeline:
        found = attend(backend, inputs)
    peak, found = torch.cuda.max_memory_allocated(), context_parallel_unshard(mesh, found, [2] * 4)
    pairs = zip(found, whole, strict=True) if values else ()
    return (peak, timeline.seconds), [float((a.float() - b.float()).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.parametrize(("backend", "method", "most"), CASES)
def test_it_equals_one_gpu_and_costs_the_same_with_shapes_only_and_alone(backend, method, most):
    with virtual_gpus(2):
        costs, differences = zip(*run_ranks(in_a_ring, 2, (backend, method, True), show=False), strict=True)
    assert max(map(max, differences)) < most
    with virtual_gpus(2, shapes_only=True):
        assert [cost for cost, _ in run_ranks(in_a_ring, 2, (backend, method), show=False)] == [*costs]
    with virtual_gpus(2, shapes_only=True, rank=1, world_size=2):
        dist.init_process_group("nccl")
        assert in_a_ring(1, backend, method)[0] == costs[1]


def test_the_kernels_by_name():
    with virtual_gpus(1):
        query = torch.ones(1, 2, 40, 8, device="cuda", dtype=torch.bfloat16)
        attention = torch.ops.aten._scaled_dot_product_efficient_attention
        out, logarithms, *_ = attention(query, query, query, None, True)
        assert out.shape == query.shape and logarithms.shape == (1, 2, 64) and logarithms[0, 0, 40:].isinf().all()
        with pytest.raises(RuntimeError, match="takes fp16 and bf16"):
            torch.ops.aten._scaled_dot_product_flash_attention(*[query.float()] * 3)
