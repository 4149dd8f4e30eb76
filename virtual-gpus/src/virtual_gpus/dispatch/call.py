"""One operator at work on a virtual GPU, as a recipe sees it: run the kernel, place results, take scratch memory."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch

from virtual_gpus.dispatch.kernels import run_kernel
from virtual_gpus.machine import VirtualGPU
from virtual_gpus.operators import Operator
from virtual_gpus.placement.storages import allocate, place_all


class Call:
    """What a recipe is given. A recipe that only calls `run` changes nothing.

    func, op: the ATen overload and its facts. gpu: where it runs. args, kwargs: as the dispatcher passed them.
    """

    __slots__ = ("args", "func", "gpu", "kwargs", "op")

    def __init__(self, func, op: Operator, gpu: VirtualGPU, args, kwargs):
        self.func, self.op, self.gpu, self.args, self.kwargs = func, op, gpu, args, kwargs

    def __getitem__(self, name: str):
        """An argument by its name in the schema, or its default."""
        position = self.op.names.index(name)
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, self.func._schema.arguments[position].default_value)

    def compute(self):
        """Run the operator's own kernel. Its results hold no GPU memory yet: `place` them, in CUDA's order."""
        return run_kernel(self.func, self.op, self.gpu, self.args, self.kwargs)

    def place(self, result):
        """Give results their blocks on the GPU: a tensor, None, or lists of them. Returns `result`."""
        place_all(result, self.gpu)
        return result

    def run(self):
        """Compute, and place all results in the order in which they are returned."""
        return self.place(self.compute())

    def run_in_place(self, tensor: torch.Tensor):
        """Run what CUDA does in place of `tensor`, and PyTorch here does not: the result takes its block over."""
        result = self.compute()
        result.untyped_storage()._home = tensor.untyped_storage()._home
        return result

    def scratch(self, nbytes: int):
        """Memory that CUDA's kernel takes on the way: `with call.scratch(nbytes): ...`. Raises OutOfMemory."""
        return scratch(self.gpu, nbytes)

    @contextmanager
    def scratches(self, sizes):
        """Several blocks at once, in order."""
        with ExitStack() as stack:
            for size in sizes:
                stack.enter_context(self.scratch(size))
            yield


class Held:
    """A block on `gpu` that is given back when this object dies, so that Ctrl-C at any line loses none.

    Raises OutOfMemory, which then knows its GPU.
    """

    __slots__ = ("__weakref__", "block")

    def __init__(self, gpu: VirtualGPU, nbytes: int):
        if not gpu.allocator.device.context:
            gpu.start_context()
        self.block = allocate(gpu, nbytes, self)


@contextmanager
def scratch(gpu: VirtualGPU, nbytes: int):
    """A block of `nbytes` on `gpu` that is given back when the block of code ends."""
    held = Held(gpu, nbytes)
    try:
        yield
    finally:
        del held  # not with the frame: a traceback may keep that


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, packed (a view or an expanded tensor may take less)."""
    return tensor.numel() * tensor.element_size()
