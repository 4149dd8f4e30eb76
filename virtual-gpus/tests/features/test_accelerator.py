"""torch.accelerator: the names that serve every kind of GPU."""

import torch
from measuring import MIB, empty
from virtual_gpus import virtual_gpus


@virtual_gpus(3, memory="2 GiB")
def test_they_answer_as_torch_cuda_does():
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 3
    assert torch.accelerator.current_accelerator() == torch.device("cuda") and torch.get_device_module() is torch.cuda
    assert torch.accelerator.current_device_index() == 0
    torch.cuda.set_device(2)
    with torch.accelerator.device_index(0):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 2
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == 1
    torch.accelerator.synchronize()
    x, y = empty(100 * MIB, "cuda:1"), empty(50 * MIB, "cuda:1")
    del y
    assert torch.accelerator.memory_allocated(1) == x.nbytes and torch.accelerator.max_memory_reserved(1) == 150 * MIB
