"""The rules of memory as functions: the buffers of reductions, and a replay of what is not known.

Sizes of blocks and segments, and replays: test_allocator.py. The workspaces of cuBLAS: test_cublas_workspaces.py.
"""

import torch
from virtual_gpus.memory_model import reduction_scratch, replay, round_size


def test_a_replay_of_what_it_does_not_know():
    """A history that begins in the middle: blocks count as their rounded sizes."""
    trace = [{"action": "alloc", "addr": 4096, "size": 1000}, {"action": "free_requested", "addr": 8192, "size": 600},
             {"action": "free_completed", "addr": 8192, "size": 600}, {"action": "oom", "device_free": 0, "size": 5},
             {"action": "free_requested", "addr": 4096, "size": 1000}]  # fmt: skip
    assert [state.allocated for state in replay(trace)] == [0, 1024, 0, 0, 0, -1024]


# Rows, columns of matrices whose rows were added up; bytes of partial results and of semaphores, both rounded up to
# blocks of 512, in traces of training steps on an H200.
COLUMN_SUMS = [
    (2048, 384, 6_291_456, 512),
    (2608, 20_000, 143_360_000, 1024),
    (4096, 1024, 33_554_432, 512),
]


def test_partial_sums_of_training_steps_on_an_h200():
    for rows, columns, partial, semaphores in COLUMN_SUMS:
        found = reduction_scratch((rows, columns), "H200", [0])
        assert tuple(map(round_size, found)) == (partial, semaphores), (rows, columns)
    assert reduction_scratch((1000, 10_000), "H200") == (4 * 528, 4)  # the mean of 10,000,000 losses: 3,072 bytes


def test_partial_sums_depend_on_the_gpu_and_the_layout():
    assert reduction_scratch((8192, 256), "H200", [0])[0] > reduction_scratch((8192, 256), "K80", [0])[0]
    assert reduction_scratch((8192, 256), "H200", [1]) == (0, 0)  # 8,192 outputs keep the GPU busy: no need to cut
    for shape, dims in (((8, 256), [0]), ((0, 4), [0]), ((), None)):
        assert reduction_scratch(shape, "H200", dims) == (0, 0)
    turned = torch.empty(2048, 384, device="meta").t()
    found = reduction_scratch(turned.shape, "H200", [-1], strides=turned.stride())
    assert found == reduction_scratch((2048, 384), "H200", [0])
