"""Whatever happens inside: afterwards the books are right, training goes on, and nothing is kept alive."""

import gc
import inspect
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


class Training:
    """A small net under DataParallel on two GPUs, with Adam."""

    def __init__(self):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
        self.net = nn.DataParallel(net.to("cuda:0"))
        self.optimizer = torch.optim.Adam(self.net.parameters())

    def step(self, batch=4):
        self.optimizer.zero_grad()
        self.net(torch.rand(batch, 8).to("cuda:0")).square().mean().backward()
        self.optimizer.step()


# ---- Ctrl-C ------------------------------------------------------------------------------------------------


class CtrlCAtCall:
    """A profile function that raises KeyboardInterrupt at the n-th moment in our code that a signal can hit.

    Those are the beginning of a function and the return of a call into C.
    """

    def __init__(self, n):
        self.left, self.place = n, None

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
        for n in range(1, total, total // 100):
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
    """The real thing, at moments of a loop."""
    armed = False

    def press(signum, frame):
        """Once per step: the timer goes on where this process has lost its core."""
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    try:
        with virtual_gpus(2):
            training = Training()
            training.step()
            base = allocated()
            for i in range(10):
                signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.0034 * i, 0.2)  # again, should C++ swallow one
                with pytest.raises((KeyboardInterrupt, SystemError)) as pressed:  # C++ wraps it around isinstance
                    while True:
                        armed = True
                        training.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert KeyboardInterrupt in (pressed.type, type(pressed.value.__cause__))
                torch.set_grad_enabled(True)  # Ctrl-C inside PyTorch's own no_grad can leave it off, on any device
                assert not snapshots.this_thread.inside
                del pressed
                training.step()  # a loss that means little: Adam was cut in the middle of an update
                assert at_once() == base or allocated() == base
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_while_switching_on_and_off():
    with virtual_gpus(2):
        pass  # imports what the first switching on imports
    before = snapshots.picture()
    gpus = virtual_gpus(2)
    total = moments(gpus.start)
    gpus.stop()
    assert total > 20
    for n in range(1, total, max(total // 15, 1)):
        gpus = virtual_gpus(2)
        interrupted(gpus.start, CtrlCAtCall(n))
        gpus.stop()
        assert snapshots.differences(before) == [], n


# ---- errors ------------------------------------------------------------------------------------------------


class FailsOn(nn.Module):
    """Raises on one GPU, for as long as `on` says so."""

    def __init__(self, error):
        super().__init__()
        self.linear, self.error, self.on = nn.Linear(4, 4), error, False

    def forward(self, x):
        y = self.linear(x)
        if self.on and x.get_device() == 1:
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError("a replica failed"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_failing_replica(error):
    with virtual_gpus(3):
        torch.cuda.set_device(2)
        net, x = nn.DataParallel(FailsOn(error).to("cuda:0")), torch.ones(6, 4).to("cuda:0")
        net(x).sum().backward()
        base = allocated(3)
        net.module.on = True
        for _ in range(2):
            with pytest.raises(type(error)):
                net(x)
            assert torch.cuda.current_device() == 2 and torch.is_grad_enabled() and not snapshots.this_thread.inside
        net.module.on = False
        net(x).sum().backward()
        error.__traceback__ = error.__context__ = None  # the test's own error object: as on real GPUs it holds frames
        assert allocated(3) == base


def test_a_failed_backward_leaves_no_gradients_waiting():
    """The CPU's engine keeps what a failed pass had still to do; that of a real GPU does not."""

    def branch(gpu, mib):
        x = torch.ones(mib * MIB // 4, device=gpu, requires_grad=True)
        return ((x * x) * (x * x)).mean().to(0)

    with virtual_gpus(3, memory="96 MiB"):
        for _ in range(2):
            loss = sum([branch(0, 1), branch(1, 1), branch(2, 16)])
            with pytest.raises(torch.OutOfMemoryError, match="GPU 2"):
                loss.backward()
            del loss
            assert not snapshots.this_thread.inside and allocated(3) == [0, 0, 0]
        with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones((), device=0).backward()
        branch(1, 1).backward()
        assert allocated(3) == [0, 0, 0]


def tensors_in_our_frames(trace):
    """Names of the tensors among the variables of the package's frames in a traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(trace) if "virtual_gpus" in frame.f_code.co_filename]
    leaves = torch.utils._pytree.tree_leaves
    found = [(name, leaves(value)) for frame in frames for name, value in frame.f_locals.items()]
    return [name for name, parts in found if any(isinstance(part, torch.Tensor) for part in parts)]


TOO_BIG = {
    "empty": lambda x: torch.empty(1 << 26, device="cuda"),
    "rand": lambda x: torch.rand(1 << 24, device="cuda"),
    "operator": lambda x: torch.cat([x] * 8),
    "copy": lambda x: torch.ones(1 << 24).to("cuda"),
    "module": lambda x: nn.BatchNorm1d(1 << 24).to("cuda"),
    "as_tensor": lambda x: torch.as_tensor(torch.ones(1 << 24), device="cuda"),
    "expanded": lambda x: torch.ones(1 << 13, device="cuda")[:, None] * torch.ones(1 << 13, device="cuda"),
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
        assert tensors_in_our_frames(kept.tb) == []
        del kept
        assert allocated() == base
        assert (x + 1).sum().item() == 8 * MIB


def test_training_goes_on_with_a_smaller_batch():
    """The pattern of every batch-size search: halve it until it fits. Then all is as if the small one came first."""

    def first_step_that_fits(batch):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 8)).to("cuda")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        tried = steps = 0
        while steps < 3:
            try:
                optimizer.zero_grad()
                x = torch.ones(batch, 64, device="cuda")
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
                steps += 1
            except torch.OutOfMemoryError:
                x = loss = None
                batch //= 2
                tried += 1
        return tried, batch, loss.item(), torch.cuda.memory_allocated(), net, optimizer

    with virtual_gpus(1, memory="64 MiB"):
        tried, batch, loss, used, *_ = first_step_that_fits(8192)
        assert tried > 1 and torch.cuda.memory_stats()["num_ooms"] == tried
    with virtual_gpus(1, memory="64 MiB"):
        assert first_step_that_fits(batch)[:4] == (0, batch, loss, used)


def test_cells_of_a_notebook(monkeypatch):
    """JupyterLab keeps the last error in sys.last_traceback: it must not keep what a cell then deletes."""
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    cells = {
        "x = torch.ones(4 * MIB, device='cuda')\nassert torch.cuda.memory_allocated() == 16 * MIB": None,
        "y = x + torch.ones(3, device='cuda:1')": "RuntimeError",
        "y = torch.cat([x] * 8)": "OutOfMemoryError",
        "y = x.numpy()": "TypeError",
        "y = x.to('cuda:9')": "AcceleratorError",
        "del x\nassert torch.cuda.memory_allocated() == 0": None,
        "x = torch.ones(4 * MIB, device='cuda:1')": None,
        "raise KeyboardInterrupt": "KeyboardInterrupt",
        "assert torch.cuda.memory_allocated(1) == 16 * MIB and (x + 1).sum().item() == 8 * MIB\ndel x": None,
        "assert torch.cuda.memory_allocated(1) == 0": None,
    }
    names, raised = {"torch": torch, "MIB": MIB}, dict.fromkeys(cells)
    with virtual_gpus(2, memory="96 MiB"):
        for cell in cells:
            try:
                exec(cell, names)
            except BaseException:
                sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
                raised[cell] = sys.last_type.__name__
    assert raised == cells


# ---- no leaks ----------------------------------------------------------------------------------------------


def test_forty_steps_take_no_more_than_three():
    def taken():
        used = [(torch.cuda.memory_allocated(i), torch.cuda.memory_reserved(i)) for i in range(2)]
        return used, len(torch.cuda.memory_snapshot())

    with virtual_gpus(2):
        training = Training()
        for _ in range(3):
            training.step(32)
        gc.disable()  # nothing may need the garbage collector
        try:
            early = taken()
            for _ in range(37):
                training.step(32)
            assert taken() == early and early[0][0] > early[0][1]
        finally:
            gc.enable()
        del training
        assert allocated() == [0, 0]
        torch.cuda.empty_cache()
        assert taken() == ([(0, 0), (0, 0)], 0)


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
