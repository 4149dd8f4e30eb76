"""Threads: new ones, old ones, pools, many at once, and those of DataLoader."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import torch
from torch.utils.data import DataLoader, TensorDataset
from virtual_gpus import active_machine, virtual_gpus


def test_new_threads_and_pools_see_the_gpus_and_have_a_current_one_of_their_own():
    def work():
        on_default_stream = torch.cuda.current_stream() == torch.cuda.default_stream()
        answers.append((torch.cuda.current_device(), torch.is_grad_enabled(), on_default_stream))
        torch.cuda.set_device(1)
        assert torch.ones(4).cuda().get_device() == 1 and (torch.ones(4, device="cuda") * 2).get_device() == 1

    answers = []
    with virtual_gpus(3), torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        work()
        torch.cuda.set_device(2)
        for thread in (threading.Thread(target=work), threading.Timer(0, work)):
            thread.start()
            thread.join()
        with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
            pool.submit(work).result()
            other.apply(work)
        assert torch.cuda.current_device() == 2
    assert answers == [(0, False, False)] + [(0, True, True)] * 4  # all three are per thread


def test_a_thread_begins_on_the_default_stream_also_with_the_number_of_one_that_has_ended():
    seen = []

    def work():
        seen.append(active_machine().gpus[0].stream)
        torch.cuda.set_stream(torch.cuda.Stream())

    with virtual_gpus(1):
        for _ in range(4):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert seen == [0] * 4


def test_an_old_thread_joins_when_it_first_names_a_gpu_and_one_of_a_pool_for_every_call():
    makers = {
        "zeros": lambda: torch.zeros(2, device="cuda:1"),
        "zeros_like": lambda: torch.zeros_like(torch.ones(2), device="cuda:1"),
        "tensor": lambda: torch.tensor([1.0, 2.0], device="cuda:1"),
        "to": lambda: torch.ones(2).to("cuda:1"),
        "cuda": lambda: torch.ones(2).cuda(1),
        "set_device": lambda: (torch.cuda.set_device(1), torch.ones(2).cuda())[1],
        "generator": lambda: torch.rand(2, device="cuda:1", generator=torch.Generator("cuda:1")),
    }
    for name, make in makers.items():
        with ThreadPool(1) as old_thread:
            old_thread.apply(torch.ones, (2,))
            for _ in range(2):  # C++ asks for its start-up once per process: the second time must work as well
                with virtual_gpus(2):
                    x = old_thread.apply(make)
                    assert x.device == old_thread.apply(torch.neg, (x,)).device == torch.device("cuda:1"), name
                    assert torch.cuda.memory_allocated(1) <= 1024
                    del x
            assert old_thread.apply(torch.neg, (torch.ones(2),)).device.type == "cpu", name
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with virtual_gpus(2):
            x = torch.ones(2, device="cuda:1")
            assert pool.submit(torch.neg, x).result().device == torch.device("cuda:1")  # without naming one
        assert pool.submit(torch.neg, torch.ones(2)).result().device.type == "cpu"
        assert pool.submit(torch.utils._python_dispatch._len_torch_dispatch_stack).result() == 0


def test_four_threads_on_four_gpus():
    """Each thread must see its own GPU in every operator, and the books must come out even. Operators without a
    generator argument borrow the CPU's: one thread at a time, and the CPU's stays as it was."""

    def work(index):
        device = torch.device("cuda", index)
        generator, kept = torch.Generator(device).manual_seed(index), []
        with torch.cuda.device(index):
            torch.cuda.manual_seed(index)
            for step in range(20):
                x = torch.rand(64, 16, device=device, generator=generator, requires_grad=True)
                y = torch.cat([x * 2, x.relu()]).reshape(-1)[::3].clone()
                y.sum().backward()
                assert x.device == y.device == x.grad.device == device and x.is_cuda
                kept = [*kept[-5:], torch.native_dropout(y.detach(), 0.5, True)[0]]
                if step % 10 == index:
                    torch.cuda.empty_cache()
        return sum(k.sum().item() for k in kept)

    with virtual_gpus(4):
        alone, state = [work(i) for i in range(4)], torch.get_rng_state()
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == alone and len(set(alone)) == 4
        assert torch.equal(torch.get_rng_state(), state)
        gc.collect()
        for i in range(4):
            assert torch.cuda.memory_allocated(i) == 0
            stats = torch.cuda.memory_stats(i)
            assert stats["allocated_bytes.all.allocated"] == stats["allocated_bytes.all.freed"] > 0
            assert stats["inactive_split_bytes.all.current"] == 0


def test_loaders_with_workers_and_a_pinning_thread_made_before_the_gpus_and_of_items_on_a_gpu():
    with virtual_gpus(2):
        numbers = torch.arange(8.0)
        squares = TensorDataset(numbers, numbers * numbers)
        loader = DataLoader(squares, batch_size=2, num_workers=1, pin_memory=True)
        for x, y in loader:
            assert x.is_pinned() and x.device.type == "cpu"
            on = x.to("cuda:1", non_blocking=True)
            assert (on * on).tolist() == y.tolist()
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, shuffle=True, pin_memory=False)
    with virtual_gpus(2):
        assert sum(x.to("cuda:1").sum().item() for (x,) in loader) == 28.0
        (batch,) = DataLoader([torch.ones(2, device="cuda:1") * i for i in range(2)], batch_size=2)
        assert batch.device == torch.device("cuda:1") and batch.tolist() == [[0.0, 0.0], [1.0, 1.0]]
