"""Whatever happens inside: afterwards the books are right, training goes on, and nothing is kept alive."""

import gc
import inspect
import linecache
import signal
import sys
import traceback

import pytest
import snapshots
import torch
from torch import nn
from virtual_gpus import active_machine, virtual_gpus

pytestmark = pytest.mark.usefixtures("workspaces_given_back")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
    assert not snapshots.this_thread.inside and torch.is_grad_enabled()


def allocated(count=2):
    """Bytes per GPU, after what only waits for the garbage collector has gone."""
    gc.collect()
    return at_once(count)


def at_once(count=2):
    """Bytes per GPU now."""
    return [torch.cuda.memory_allocated(i) for i in range(count)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


class Training:
    """A small net under DataParallel on two GPUs, with Adam; `step` gives the loss."""

    def __init__(self):
        self.net = nn.DataParallel(network().to("cuda:0"))
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.data = torch.Generator().manual_seed(1)

    def step(self, batch=4):
        x = torch.rand(batch, 8, generator=self.data).to("cuda:0")
        loss = self.net(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


# ---- Ctrl-C ------------------------------------------------------------------------------------------------


class CtrlCAtCall:
    """A profile function that raises KeyboardInterrupt at the n-th call or return in our own code.

    Python looks for signals when a function begins and when a call into C has returned: just there.
    """

    def __init__(self, n):
        self.left = n
        self.place = None

    def __call__(self, frame, event, argument):
        if event not in ("call", "c_return") or "virtual_gpus" not in frame.f_code.co_filename:
            return
        if event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # Python may be closing it, which is a call for a profile function, but no moment for a signal
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt


def interrupted(function, profile):
    """True if `function` was cut short. sys.setprofile, unlike a timer, cuts at the same places in every run."""
    before = sys.getprofile()
    try:
        sys.setprofile(profile)
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


def moments(function):
    """How many moments `function` has at which Ctrl-C may hit our code."""
    counter = CtrlCAtCall(-1)
    interrupted(function, counter)
    return -1 - counter.left


def test_ctrl_c_at_any_moment():
    with virtual_gpus(2):
        training = Training()
        training.step()
        training.step()
        base, total = allocated(), moments(training.step)
        assert total > 1000
        for n in range(1, total, total // 150):
            cut = CtrlCAtCall(n)
            if not interrupted(training.step, cut):  # the clock's own calls vary a little from step to step
                assert n > 0.95 * total, n
                continue
            assert not snapshots.this_thread.inside, cut.place
            assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 1, cut.place
            assert torch.cuda.current_device() == 0 and torch.is_grad_enabled(), cut.place
            training.step()
            assert at_once() == base or allocated() == base, cut.place
            clock = active_machine().clock
            assert clock.share == 1 and clock._threads is None, cut.place


def test_ctrl_c_by_signal():
    """The real thing, at twenty moments of a loop."""

    armed = False

    def steps(training):
        nonlocal armed
        for _ in range(10_000):
            armed = True
            training.step()

    def press(signum, frame):
        """Once per step, and only in the loop: the timer goes on where this process has lost its core."""
        nonlocal armed
        if armed and is_inside(frame, steps):
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    pressed = 0
    try:
        with virtual_gpus(2):
            training = Training()
            training.step()
            base = allocated()
            for i in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.0017 * i, 0.2)  # again, should C++ swallow one
                try:
                    steps(training)
                except (
                    KeyboardInterrupt,
                    SystemError,
                ) as error:  # C++ may wrap it when it asks for isinstance
                    pressed += isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)
                signal.setitimer(signal.ITIMER_REAL, 0)
                torch.set_grad_enabled(True)  # Ctrl-C inside PyTorch's own no_grad can leave it off, on any device
                assert not snapshots.this_thread.inside
                training.step()  # a loss that means little: Adam was cut in the middle of an update
                assert at_once() == base or allocated() == base
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert pressed == 20


def is_inside(frame, function):
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_ctrl_c_while_switching_on_and_off():
    with virtual_gpus(2):
        pass  # imports what the first switching on imports
    before = snapshots.picture()
    total = moments(lambda: virtual_gpus(2).start() and None)
    from virtual_gpus import machine

    stop_all(machine)
    assert total > 20
    for n in range(1, total, max(total // 25, 1)):
        gpus = virtual_gpus(2)
        if not interrupted(gpus.start, CtrlCAtCall(n)):
            gpus.stop()
        gpus.stop()
        assert snapshots.differences(before) == [], n


def stop_all(machine):
    """The GPUs that nobody holds any more: started in a lambda above."""
    from virtual_gpus import patches
    from virtual_gpus.dispatch import mode

    while machine._stack:
        machine.remove(machine._stack[-1])
    mode.leave_thread()
    patches.uninstall()


# ---- errors ------------------------------------------------------------------------------------------------


class FailsOn(nn.Module):
    """Raises on one GPU, for as long as `on` says so."""

    def __init__(self, error):
        super().__init__()
        self.linear, self.error, self.on = nn.Linear(4, 4), error, True

    def forward(self, x):
        y = self.linear(x)
        if self.on and x.get_device() == 1:
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError("a replica failed"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_a_failing_replica(error):
    with virtual_gpus(3):
        torch.cuda.set_device(2)
        net = nn.DataParallel(FailsOn(error).to("cuda:0"))
        net.module.on = False
        net(torch.ones(6, 4).to("cuda:0")).sum().backward()
        base = allocated(3)
        net.module.on = True
        for _ in range(3):
            with pytest.raises(type(error)):
                net(torch.ones(6, 4).to("cuda:0"))
            assert torch.cuda.current_device() == 2 and torch.is_grad_enabled() and not snapshots.this_thread.inside
        net.module.on = False
        net(torch.ones(6, 4).to("cuda:0")).sum().backward()
        error.__traceback__ = error.__context__ = None  # the test's own error object: as on real GPUs it holds frames
        assert allocated(3) == base


def test_an_error_in_backward():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("in backward")

    with virtual_gpus(2):
        weight = torch.ones(1000, device="cuda:0", requires_grad=True)
        base = allocated()
        for _ in range(3):
            with pytest.raises(ValueError, match="in backward"):
                (Fails.apply(weight.to("cuda:1") * 3) + 1).sum().backward()
            assert not snapshots.this_thread.inside
        assert allocated() == base
        (weight.to("cuda:1") * 3).sum().backward()
        assert weight.grad.sum().item() == 3000.0


def test_a_failed_backward_leaves_no_gradients_waiting():
    """The CPU's engine keeps what a failed pass had still to do; that of a real GPU does not."""

    def branch(gpu, mib):
        x = torch.ones(mib * MIB // 4, device=gpu, requires_grad=True)
        return ((x * x) * (x * x)).mean().to(0)

    with virtual_gpus(3, memory="1 GiB"):
        for _ in range(2):
            loss = sum([branch(0, 10), branch(1, 10), branch(2, 160)])
            with pytest.raises(torch.OutOfMemoryError, match="GPU 2"):
                loss.backward()
            del loss
            assert allocated(3) == [0, 0, 0]
        with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones((), device=0).backward()
        branch(1, 10).backward()
        assert allocated(3) == [0, 0, 0]


def frames_of_ours(trace):
    """(function, names of tensors among its variables) of each frame of a traceback that is in the package."""
    for frame, _ in traceback.walk_tb(trace):
        if "virtual_gpus" in frame.f_code.co_filename:
            yield frame.f_code.co_name, [n for n, v in frame.f_locals.items() if holds_tensor(v)]


def holds_tensor(value):
    parts = value if isinstance(value, (list, tuple)) else list(value.values()) if isinstance(value, dict) else [value]
    return any(isinstance(part, torch.Tensor) for part in parts)


TOO_BIG = {
    "empty": lambda x: torch.empty(1 << 26, device="cuda"),
    "rand": lambda x: torch.rand(1 << 24, device="cuda"),
    "operator": lambda x: torch.cat([x] * 8),
    "copy": lambda x: torch.ones(1 << 24).to("cuda"),
    "module": lambda x: nn.BatchNorm1d(1 << 24).to("cuda"),
    "as_tensor": lambda x: torch.as_tensor(torch.ones(1 << 24), device="cuda"),
    "scatter": lambda x: nn.parallel.scatter(torch.ones(1 << 25), [0, 1]),
    "clone of a storage": lambda x: [x.untyped_storage().clone() for _ in range(8)],
}


@pytest.mark.parametrize("name", TOO_BIG)
def test_an_out_of_memory_error_keeps_nothing_alive(name):
    with virtual_gpus(2, memory="64 MiB"):
        x = torch.ones(4 * MIB, device="cuda")  # 16 MiB
        base = allocated()
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as kept:
            TOO_BIG[name](x)
        assert [names for _, names in frames_of_ours(kept.tb) if names] == []
        del kept
        assert allocated() == base
        assert (x + 1).sum().item() == 8 * MIB


def test_training_goes_on_with_a_smaller_batch():
    """The pattern of every batch-size search: halve it until it fits. Then all is as if the small one came first."""

    def first_step_that_fits(batch):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).to("cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        tried = 0
        while True:
            tried += 1
            try:
                optimizer.zero_grad()
                x = torch.ones(batch, 64, device="cuda")
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                break
            except torch.OutOfMemoryError:
                x = loss = None
                batch //= 2
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
        return tried, batch, loss.item(), torch.cuda.memory_allocated(), net, optimizer

    with virtual_gpus(1, memory="64 MiB"):
        tried, batch, loss, used, *_ = first_step_that_fits(8192)
        assert tried > 2 and torch.cuda.memory_stats()["num_ooms"] == tried - 1
    with virtual_gpus(1, memory="64 MiB"):
        assert first_step_that_fits(batch)[:4] == (1, batch, loss, used)


def test_cells_of_a_notebook():
    """JupyterLab keeps the last error in sys.last_traceback: it must not keep what a cell then deletes."""
    cells = [
        "x = torch.ones(4 * MIB, device='cuda')\nassert torch.cuda.memory_allocated() == 16 * MIB",
        "y = x + torch.ones(3, device='cuda:1')",
        "y = torch.cat([x] * 8)",
        "y = x.numpy()",
        "y = x.to('cuda:9')",
        "del x\nassert torch.cuda.memory_allocated() == 0",
        "x = torch.ones(4 * MIB, device='cuda:1')",
        "raise KeyboardInterrupt",
        "assert torch.cuda.memory_allocated(1) == 16 * MIB and (x + 1).sum().item() == 8 * MIB\ndel x",
        "assert torch.cuda.memory_allocated(1) == 0",
    ]
    names, errors = {"torch": torch, "MIB": MIB}, []
    kept = {n: getattr(sys, n, None) for n in ("last_type", "last_value", "last_traceback")}
    try:
        with virtual_gpus(2, memory="96 MiB"):
            for i, cell in enumerate(cells):
                try:
                    exec(compile(cell, f"cell {i}", "exec"), names)
                except BaseException:
                    sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
                    errors.append((i, sys.last_type.__name__))
        wanted = ["RuntimeError", "OutOfMemoryError", "TypeError", "AcceleratorError", "KeyboardInterrupt"]
        assert errors == list(zip([1, 2, 3, 4, 7], wanted, strict=True))
    finally:
        for name, value in kept.items():
            setattr(sys, name, value)
        linecache.checkcache()


# ---- no leaks ----------------------------------------------------------------------------------------------


def test_two_hundred_steps_take_no_more_than_three():
    with virtual_gpus(2):
        training = Training()
        for _ in range(3):
            training.step(32)
        gc.disable()  # nothing may need the garbage collector
        try:
            early = [(torch.cuda.memory_allocated(i), torch.cuda.memory_reserved(i)) for i in range(2)]
            segments = len(torch.cuda.memory_snapshot())
            for _ in range(197):
                training.step(32)
            late = [(torch.cuda.memory_allocated(i), torch.cuda.memory_reserved(i)) for i in range(2)]
        finally:
            gc.enable()
        assert late == early and len(torch.cuda.memory_snapshot()) == segments
        assert early[0][0] > early[1][0] >= 0
        del training
        assert allocated() == [0, 0]
        torch.cuda.empty_cache()
        assert [torch.cuda.memory_reserved(i) for i in range(2)] == [0, 0]
        assert torch.cuda.memory_snapshot() == []


@pytest.mark.parametrize("shapes_only", [False, True])
def test_every_kind_of_tensor_gives_its_memory_back(shapes_only):
    with virtual_gpus(2, shapes_only=shapes_only):
        for _ in range(2):
            x = torch.rand(100, 100, device="cuda:1", requires_grad=True)
            views = [x[1:], x.T, x.view(-1), x.detach(), nn.Parameter(x)]
            resized = torch.empty(0, device="cuda:1").resize_(5000)
            copies = [x.to("cuda:0"), x.clone(), x.half(), x.double().to("cuda:0"), torch.stack([x, x])]
            (copies[0].sum() + copies[3].sum()).backward()
            loop = [x]
            loop.append(loop)
            assert min(torch.cuda.memory_allocated(i) for i in range(2)) > 0
            del x, views, resized, copies, loop
            assert allocated() == [0, 0]
