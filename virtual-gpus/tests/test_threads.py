"""Threads: new ones, old ones, pools, event loops, many at once, and those of DataLoader."""

import asyncio
import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from ranks import HANGS_S
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data import get_worker_info as worker_info
from virtual_gpus import virtual_gpus


@pytest.fixture(autouse=True)
def no_hidden_cards(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# ---- new threads -------------------------------------------------------------------------------------------


def test_new_threads_and_pools_see_the_gpus():
    def work():
        x = torch.ones(4, device="cuda:1")
        on_default_stream = torch.cuda.current_stream() == torch.cuda.default_stream()
        return (x * 2).get_device(), x.is_cuda, torch.cuda.current_device(), torch.is_grad_enabled(), on_default_stream

    answers = []
    with virtual_gpus(2), torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        assert work() == (1, True, 0, False, False)  # the last two are per thread
        for thread in (
            threading.Thread(target=lambda: answers.append(work())),
            threading.Timer(0, lambda: answers.append(work())),
        ):
            thread.start()
            thread.join()
        with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
            answers += [pool.submit(work).result(), other.apply(work)]
    assert answers == [(1, True, 0, True, True)] * 4


def test_every_thread_has_its_own_current_device():
    together = threading.Barrier(4, timeout=HANGS_S)

    def work(index):
        assert torch.cuda.current_device() == 0
        torch.cuda.set_device(index)
        together.wait()
        with torch.cuda.device((index + 1) % 4):
            inside = torch.ones(1, device="cuda").get_device()
        together.wait()
        return torch.cuda.current_device(), torch.ones(1).cuda().get_device(), inside

    with virtual_gpus(4):
        torch.cuda.set_device(2)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [(i, i, (i + 1) % 4) for i in range(4)]
        assert torch.cuda.current_device() == 2


def test_a_backward_pass_in_another_thread():
    with virtual_gpus(2), ThreadPoolExecutor(1) as pool:
        weight = torch.ones(3, device="cuda:0", requires_grad=True)
        loss = (weight.to("cuda:1") * 2).sum()
        pool.submit(loss.backward).result()
        assert weight.grad.device == torch.device("cuda:0") and weight.grad.tolist() == [2.0] * 3


# ---- threads that were there before ------------------------------------------------------------------------


class Loop:
    """A thread that runs what it is given, one call at a time."""

    def __init__(self):
        self._calls, self._answers = queue.Queue(), queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while call := self._calls.get():
            try:
                self._answers.put((call(), None))
            except Exception as error:  # handed to the caller
                self._answers.put((None, error))

    def __call__(self, function):
        self._calls.put(function)
        value, error = self._answers.get(timeout=HANGS_S)
        if error is not None:
            raise error
        return value

    def close(self):
        self._calls.put(None)


def _set_device():
    torch.cuda.set_device(1)
    return torch.ones(2).cuda()


def _with_device():
    with torch.cuda.device(1):
        return torch.ones(2).cuda()


NAMED = {
    "zeros": lambda: torch.zeros(2, device="cuda:1"),
    "rand": lambda: torch.rand(2, device=torch.device("cuda:1")),
    "zeros_like": lambda: torch.zeros_like(torch.ones(2), device="cuda:1"),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda:1"),
    "to": lambda: torch.ones(2).to("cuda:1"),
    "cuda": lambda: torch.ones(2).cuda(1),
    "Module": lambda: torch.nn.Linear(2, 2).to("cuda:1").weight.detach(),
    "set_device": _set_device,
    "device": _with_device,
    "generator": lambda: torch.rand(2, device="cuda:1", generator=torch.Generator("cuda:1")),
}


@pytest.mark.parametrize("name", NAMED)
def test_an_old_thread_joins_when_it_first_names_a_gpu(name):
    def work():
        x = NAMED[name]()
        return x.device, (x + 1).device

    old_thread = Loop()
    old_thread(lambda: torch.ones(2))
    for _ in range(2):  # C++ asks for its start-up once per process: the second time must work as well
        with virtual_gpus(2):
            assert old_thread(work) == (torch.device("cuda:1"),) * 2
            assert torch.cuda.memory_allocated(1) <= 512
    assert old_thread(lambda: (torch.ones(2) + 1).device.type) == "cpu"
    old_thread.close()


def test_a_pool_made_before_joins_for_every_call():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with virtual_gpus(2):
            x = torch.ones(2, device="cuda:1")
            assert pool.submit(lambda: (x + 1).device).result() == torch.device("cuda:1")  # without naming one
        assert pool.submit(lambda: (torch.ones(2) + 1).device.type).result() == "cpu"
        assert pool.submit(torch.utils._python_dispatch._len_torch_dispatch_stack).result() == 0


def test_an_event_loop_in_an_old_thread():
    """JupyterLab runs the callbacks of widgets so, in a thread that may be older than the GPUs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def callback(x):
        await asyncio.sleep(0)
        return (x * 2).device, torch.zeros(3, device="cuda:1").device

    try:
        with virtual_gpus(2):
            x = torch.ones(2, device="cuda:0")
            answer = asyncio.run_coroutine_threadsafe(callback(x), loop).result(HANGS_S)
        assert answer == (torch.device("cuda:0"), torch.device("cuda:1"))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# ---- many at once ------------------------------------------------------------------------------------------


def test_four_threads_on_four_gpus():
    """Each thread must see its own GPU in every operator, and the books must come out even. Operators without a
    generator argument borrow the CPU's: one thread at a time, and the CPU's stays as it was."""

    def work(index):
        device = torch.device("cuda", index)
        generator, kept = torch.Generator(device).manual_seed(index), []
        with torch.cuda.device(index):
            torch.cuda.manual_seed(index)
            for step in range(60):
                x = torch.rand(64, 16, device=device, generator=generator, requires_grad=True)
                y = torch.cat([x * 2, x.relu()]).reshape(-1)[::3].clone()
                y.sum().backward()
                assert x.device == y.device == x.grad.device == device and x.is_cuda
                kept = [*kept[-5:], torch.native_dropout(y.detach(), 0.5, True)[0]]
                if step % 10 == index:
                    torch.cuda.empty_cache()
        return sum(k.sum().item() for k in kept)

    with virtual_gpus(4):
        alone = [work(i) for i in range(4)]
        state = torch.get_rng_state()
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == alone and len(set(alone)) == 4
        assert torch.equal(torch.get_rng_state(), state)
        gc.collect()
        for i in range(4):
            assert torch.cuda.memory_allocated(i) == 0
            stats = torch.cuda.memory_stats(i)
            assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] > 0
            assert stats["inactive_split_bytes.all.current"] == 0
        torch.cuda.empty_cache()
        assert [torch.cuda.memory_reserved(i) for i in range(4)] == [0] * 4


def test_tensors_made_in_one_thread_die_in_another():
    passed = queue.Queue(maxsize=8)

    def make():
        for i in range(100):
            passed.put(torch.full((100 + i,), float(i), device="cuda"))

    def take():
        for _ in range(100):
            x = passed.get(timeout=HANGS_S)
            assert (x - x[0]).abs().sum().item() == 0.0

    with virtual_gpus(1):
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(f) for f in (make, take, make, take)]:
                future.result()
        gc.collect()
        assert torch.cuda.memory_allocated() == 0 < torch.cuda.max_memory_allocated()


def test_an_error_in_one_thread_leaves_the_others_alone():
    def work(index):
        return (torch.ones(2, device=f"cuda:{index}") + torch.ones(2, device=f"cuda:{index % 2}")).get_device()

    with virtual_gpus(3), ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(work, i) for i in (0, 2, 1)]
        assert isinstance(futures[1].exception(), RuntimeError)
        assert [futures[0].result(), futures[2].result()] == [0, 1]


# ---- DataLoader --------------------------------------------------------------------------------------------


class Squares(Dataset):
    """Eight numbers, their squares, and the process that made them."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor([float(i)]), float(i * i), worker_info().id


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_and_the_pinning_thread(start, workers):
    with virtual_gpus(2):
        loader = DataLoader(
            Squares(), batch_size=2, num_workers=workers, pin_memory=True, multiprocessing_context=start
        )
        seen = []
        for x, y, worker in loader:
            assert x.is_pinned() and x.device.type == "cpu" and set(worker.tolist()) <= set(range(workers))
            on = x.to("cuda:1", non_blocking=True)
            seen += zip((on * on).flatten().tolist(), y.tolist(), strict=True)
        assert seen == [(float(i * i), float(i * i)) for i in range(8)]
        del on
        gc.collect()
        assert torch.cuda.memory_allocated(1) == 0


def test_a_loader_made_before_the_gpus_and_items_on_a_gpu():
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, shuffle=True, pin_memory=False)
    with virtual_gpus(2):
        assert sum(x.to("cuda:1").sum().item() for (x,) in loader) == 28.0
        (batch,) = DataLoader([torch.ones(2, device="cuda:1") * i for i in range(2)], batch_size=2)
        assert batch.device == torch.device("cuda:1") and batch.tolist() == [[0.0, 0.0], [1.0, 1.0]]
