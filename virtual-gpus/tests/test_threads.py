"""Threads: new ones, old ones, pools, event loops, many at once, and those of DataLoader."""

import asyncio
import gc
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data import get_worker_info as worker_info
from virtual_gpus import active_machine, virtual_gpus

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_hidden_cards(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


class Loop:
    """A thread that was there before: it runs what it is given, one call at a time."""

    def __init__(self):
        self._calls, self._answers = queue.Queue(), queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put((call(), None))
            except Exception as error:  # handed to the caller
                self._answers.put((None, error))

    def __call__(self, function):
        self._calls.put(function)
        value, error = self._answers.get(timeout=60)
        if error is not None:
            raise error
        return value

    def close(self):
        self._calls.put(None)
        self._thread.join()


@pytest.fixture
def old_thread():
    loop = Loop()
    loop(lambda: torch.ones(2))
    yield loop
    loop.close()


# ---- new threads -------------------------------------------------------------------------------------------


def test_new_threads_and_pools_see_the_gpus():
    def work():
        x = torch.ones(4, device="cuda:1")
        return (x * 2).device, x.is_cuda, torch.cuda.current_device()

    answers = []
    with virtual_gpus(2):
        thread = threading.Thread(target=lambda: answers.append(work()))
        thread.start()
        thread.join()
        timer = threading.Timer(0, lambda: answers.append(work()))
        timer.start()
        timer.join()
        with ThreadPoolExecutor(2) as pool, ThreadPool(2) as other:
            answers += [pool.submit(work).result(), other.apply(work)]
    assert answers == [(torch.device("cuda:1"), True, 0)] * 4


def test_every_thread_has_its_own_current_device():
    together = threading.Barrier(4)

    def work(index):
        assert torch.cuda.current_device() == 0
        torch.cuda.set_device(index)
        together.wait(60)
        with torch.cuda.device((index + 1) % 4):
            inside = torch.ones(1, device="cuda").get_device()
        together.wait(60)
        return torch.cuda.current_device(), torch.ones(1).cuda().get_device(), inside

    with virtual_gpus(4):
        torch.cuda.set_device(2)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [(i, i, (i + 1) % 4) for i in range(4)]
        assert torch.cuda.current_device() == 2


def test_grad_mode_and_streams_are_per_thread():
    def work():
        return torch.is_grad_enabled(), torch.cuda.current_stream() == torch.cuda.default_stream()

    with virtual_gpus(2), torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(work).result() == (True, True)


def test_a_backward_pass_in_another_thread():
    with virtual_gpus(2), ThreadPoolExecutor(1) as pool:
        weight = torch.ones(3, device="cuda:0", requires_grad=True)
        loss = (weight.to("cuda:1") * 2).sum()
        pool.submit(loss.backward).result()
        assert weight.grad.device == torch.device("cuda:0") and weight.grad.tolist() == [2.0] * 3


# ---- threads that were there before ------------------------------------------------------------------------

NAMED = {
    "zeros": lambda: torch.zeros(2, device="cuda:1"),
    "rand": lambda: torch.rand(2, device=torch.device("cuda:1")),
    "zeros_like": lambda: torch.zeros_like(torch.ones(2), device="cuda:1"),
    "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda:1"),
    "to": lambda: torch.ones(2).to("cuda:1"),
    "cuda": lambda: torch.ones(2).cuda(1),
    "Module": lambda: torch.nn.Linear(2, 2).to("cuda:1").weight.detach(),
    "set_device": lambda: torch.cuda.set_device(1) or torch.ones(2).cuda(),
    "device": lambda: _with(torch.cuda.device(1)),
    "generator": lambda: torch.rand(2, device="cuda:1", generator=torch.Generator("cuda:1")),
}


def _with(context):
    with context:
        return torch.ones(2).cuda()


@pytest.mark.parametrize("name", NAMED)
def test_an_old_thread_joins_when_it_first_names_a_gpu(old_thread, name):
    for _ in range(2):  # C++ asks for its start-up once per process: the second time must work as well
        with virtual_gpus(2):

            def work():
                x = NAMED[name]()
                return x.device, (x + 1).device

            assert old_thread(work) == (torch.device("cuda:1"),) * 2
            assert torch.cuda.memory_allocated(1) <= 512
    assert old_thread(lambda: (torch.ones(2) + 1).device.type) == "cpu"


def test_a_pool_made_before_joins_for_every_call():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with virtual_gpus(2):
            x = torch.ones(2, device="cuda:1")
            assert pool.submit(lambda: (x + 1).device).result() == torch.device("cuda:1")  # without naming one
        assert pool.submit(lambda: (torch.ones(2) + 1).device.type).result() == "cpu"
        depth = torch.utils._python_dispatch._len_torch_dispatch_stack
        assert pool.submit(depth).result() == 0


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
            answer = asyncio.run_coroutine_threadsafe(callback(x), loop).result(60)
        assert answer == (torch.device("cuda:0"), torch.device("cuda:1"))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# ---- many at once ------------------------------------------------------------------------------------------


def test_four_threads_on_four_gpus():
    """Each thread must see its own GPU in every operator, and the books must come out even."""

    def work(index):
        device = torch.device("cuda", index)
        generator = torch.Generator(device).manual_seed(index)
        kept = []
        for step in range(60):
            x = torch.rand(64, 16, device=device, generator=generator, requires_grad=True)
            y = torch.cat([x * 2, x.relu()]).reshape(-1)[::3].clone()
            y.sum().backward()
            assert x.device == y.device == x.grad.device == device and x.is_cuda
            kept = [*kept[-5:], y.detach()]
            if step % 10 == index:
                torch.cuda.empty_cache()
        return sum(k.sum().item() for k in kept)

    with virtual_gpus(4):
        alone = [work(i) for i in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == alone
        gc.collect()
        for i in range(4):
            assert torch.cuda.memory_allocated(i) == 0
            stats = torch.cuda.memory_stats(i)
            assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] > 0
            assert stats["inactive_split_bytes.all.current"] == 0
        torch.cuda.empty_cache()
        assert [torch.cuda.memory_reserved(i) for i in range(4)] == [0] * 4


def test_four_threads_on_one_gpu():
    """Tensors made in one thread die in another."""
    passed = queue.Queue(maxsize=8)

    def make():
        for i in range(300):
            passed.put(torch.full((100 + i,), float(i), device="cuda"))

    def take():
        for _ in range(300):
            x = passed.get(timeout=60)
            assert (x - x[0]).abs().sum().item() == 0.0

    with virtual_gpus(1):
        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(f) for f in (make, take, make, take)]:
                future.result()
        gc.collect()
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() > 0


def test_random_numbers_of_threads_do_not_mix():
    """Operators without a generator argument borrow the CPU's: one thread at a time, and the CPU's stays as it was."""

    def work(index):
        with torch.cuda.device(index):
            torch.cuda.manual_seed(index)
            x = torch.ones(50, device="cuda")
            return [torch.native_dropout(x, 0.5, True)[0].sum().item() for _ in range(100)]

    with virtual_gpus(4):
        alone = [work(i) for i in range(4)]
        state = torch.get_rng_state()
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == alone
        assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(a) for a in alone}) == 4


def test_an_error_in_one_thread_leaves_the_others_alone():
    def work(index):
        if index == 1:
            return torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
        return torch.ones(2, device=f"cuda:{index}").get_device()

    with virtual_gpus(3), ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(work, i) for i in range(3)]
        assert isinstance(futures[1].exception(), RuntimeError)
        assert [futures[0].result(), futures[2].result()] == [0, 2]


# ---- DataLoader --------------------------------------------------------------------------------------------


class Squares(Dataset):
    """Eight numbers, their squares, and the process that made them."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor([float(i)]), float(i * i), worker_info().id if worker_info() else -1


class OnGPU(Dataset):
    """Its items are on a GPU: no worker may send them."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.ones(2, device="cuda:1") * i


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


def test_without_workers_items_may_be_on_a_gpu():
    with virtual_gpus(2):
        batches = list(DataLoader(OnGPU(), batch_size=2))
        assert batches[0].device == torch.device("cuda:1") and batches[0].tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_loader_made_before_the_gpus():
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, shuffle=True, pin_memory=False)
    with virtual_gpus(2):
        assert sum(x.to("cuda:1").sum().item() for (x,) in loader) == 28.0


def test_prefetching_thread():
    """The pattern of a hand-written prefetcher: a thread copies the next batch while this one is used."""
    batches = queue.Queue(maxsize=2)

    def fetch():
        for i in range(6):
            batches.put(torch.full((MIB // 4,), float(i)).to("cuda:1"))
            time.sleep(0)
        batches.put(None)

    with virtual_gpus(2):
        threading.Thread(target=fetch, daemon=True).start()
        total = 0.0
        while (x := batches.get(timeout=60)) is not None:
            total += x[0].item()
        assert total == 15.0
        assert torch.cuda.max_memory_allocated(1) <= 6 * MIB
        assert active_machine() is not None
