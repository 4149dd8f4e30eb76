"""Several processes on the same virtual cards, and allocator options through torch."""

import multiprocessing
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import GPUtil
import pytest
import torch
from measuring import MIB, empty
from ranks import run_ranks
from virtual_gpus import NotModelled, active_machine, virtual_gpus
from virtual_gpus.processes import shared_memory
from virtual_gpus.processes.shared_memory import FOLDER

FORK, SPAWN = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")


def hold(pipe, nbytes, index):
    x = empty(nbytes, f"cuda:{index}")
    pipe.send([torch.cuda.device_memory_used(index), torch.cuda.mem_get_info(index)[0]])
    pipe.recv()
    del x


@contextmanager
def holding(nbytes, index=0):
    """A process that holds memory on a card, and what it finds used and free there."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=hold, args=(theirs, nbytes, index), daemon=True)
    process.start()
    theirs.close()  # else nobody hears that the process has ended early
    yield process, *received(ours)
    if process.is_alive():
        ours.send("end")
        process.join(300)
        assert process.exitcode == 0


def received(pipe):
    assert pipe.poll(300)
    return pipe.recv()


def test_a_card_is_shared_and_a_killed_process_gives_its_memory_back():
    """A fork counts for itself: what it has from its parent counts once."""
    with virtual_gpus(2, memory="2 GiB"):
        x, before = empty(200 * MIB, "cuda:1"), torch.cuda.device_memory_used(1)
        with holding(600 * MIB, 1) as (process, used, free):
            assert used == before + 600 * MIB == torch.cuda.device_memory_used(1) and free == 2048 * MIB - used
            assert [g.memoryUsed for g in GPUtil.getGPUs()] == [0, used / MIB]
            assert before == x.nbytes + active_machine().gpus[1].allocator.device.context
            assert f"process {process.pid:>10d} uses" in torch.cuda.list_gpu_processes(1)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                empty(1200 * MIB, "cuda:1")
            assert f"Process {process.pid} has 600.00 MiB memory in use. Incl" in str(caught.value)
            assert f"this process has {before / MIB:.2f} MiB memory in use. Of the allocated" in str(caught.value)
            assert f"of which {free / MIB:.2f} MiB is free" in str(caught.value)
            os.kill(process.pid, signal.SIGKILL)
            process.join(300)
        assert torch.cuda.device_memory_used(1) == before
        assert empty(1200 * MIB, "cuda:1").is_cuda
        folder = Path(os.environ[FOLDER])
        del x
    assert not folder.exists() and FOLDER not in os.environ


def take_pieces(rank):
    torch.cuda.mem_get_info(0)
    torch.distributed.barrier()  # each has its context
    held = []
    with pytest.raises(torch.OutOfMemoryError):
        while True:
            held.append(empty(20 * MIB, "cuda:0"))
    torch.distributed.barrier()
    return len(held) * 20 * MIB + active_machine().gpus[0].allocator.device.context


def test_together_no_more_is_given_out_than_the_card_has():
    """Each of four processes takes 20 MiB until there is no more."""
    with virtual_gpus(4, memory="4 GiB"):
        given = sum(run_ranks(take_pieces, ranks=4, show=False, timeout=300))
    assert 4096 * MIB - 20 * MIB < given <= 4096 * MIB


def test_a_full_card_takes_no_further_process():
    with virtual_gpus(1, memory="2 GiB"):
        with holding(1700 * MIB), pytest.raises(torch.AcceleratorError, match="CUDA error: out of memory"):
            empty(1)
        assert empty(1).is_cuda


def look(pipe):
    """A program of its own: what it finds in use on a card of so much memory, in a shared folder."""
    for folder, memory in iter(pipe.recv, None):
        os.environ[FOLDER] = folder
        with virtual_gpus(1, memory=memory):
            pipe.send(torch.cuda.device_memory_used(0))


def test_programs_that_were_started_apart_share_a_folder_that_both_name(tmp_path, monkeypatch):
    pipe, theirs = SPAWN.Pipe()
    SPAWN.Process(target=look, args=(theirs,), daemon=True).start()

    def used(folder, memory="2 GiB"):
        pipe.send([str(folder), memory])
        return received(pipe)

    with virtual_gpus(1, memory="2 GiB"):
        x = empty(MIB)
        with virtual_gpus(1, memory="2 GiB"):  # one inside another: other cards
            assert torch.cuda.device_memory_used(0) == 0
        assert used(os.environ[FOLDER], "1 GiB") == 0  # other cards too
        assert used(os.environ[FOLDER]) == torch.cuda.device_memory_used(0) > x.nbytes
    cards = tmp_path / "cards"
    monkeypatch.setenv(FOLDER, str(cards))
    with virtual_gpus(1, memory="2 GiB"):
        x = empty(MIB)
        assert used(cards) == torch.cuda.device_memory_used(0) > x.nbytes
        del x
    assert os.environ[FOLDER] == str(cards) and [path.name for path in cards.iterdir()] == [".lock"]
    assert used(cards) == 0
    pipe.send(None)


def test_folders_of_torchruns_workers(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_PORT", "12345")
    with virtual_gpus(1):
        first = os.environ[FOLDER]
    with virtual_gpus(1):
        assert os.environ[FOLDER] == first and str(os.getppid()) in first
    (tmp_path / "cards").touch()
    monkeypatch.setenv(FOLDER, str(tmp_path / "cards"))
    with virtual_gpus(1), pytest.raises(FileExistsError, match="cards"):
        empty(MIB)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_environment_is_read_at_the_first_touch(monkeypatch, name):
    with virtual_gpus(1, memory="1 GiB"):
        monkeypatch.setenv(name, "expandable_segments:True,max_split_size_mb:200")
        x = empty(30 * MIB)
        monkeypatch.setenv(name, "expandable_segments:False")
        y = empty(15 * MIB)
        (segment,) = torch.cuda.memory_snapshot()
        assert segment["is_expandable"] and segment["total_size"] == 60 * MIB  # 45 MiB in pages of 20
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        assert settings["expandable_segments"] and settings["max_split_size"] == 200 * MIB
        assert torch.cuda.memory_stats()["max_split_size"] == 200 * MIB
        del x, y
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")  # the older name counts
    with virtual_gpus(1):
        assert torch.ones(1, device="cuda").is_cuda
        assert not torch.cuda.memory_snapshot()[0]["is_expandable"]


def test_a_wrong_environment_shows_at_the_first_touch(monkeypatch):
    wrong = {
        "max_split_size_mb:3": (ValueError, "max_split_size_mb:3 has no value that PyTorch takes"),
        "throw_on_cudamalloc_oom:True": (NotModelled, 'the allocator setting "throw_on_cudamalloc_oom:True"'),
    }
    for text, (error, message) in wrong.items():
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
        with virtual_gpus(1):
            for _ in range(2):
                with pytest.raises(error, match=message):
                    torch.ones(1, device="cuda")


def test_a_call_changes_the_options_of_all_gpus():
    with virtual_gpus(2, memory="1 GiB"):
        set_options = torch._C._accelerator_setAllocatorSettings
        x = [empty(30 * MIB, device) for device in range(2)]
        set_options("expandable_segments:True")
        x += [empty(30 * MIB, device) for device in range(2)]
        assert [torch.cuda.memory_reserved(i) for i in range(2)] == [70 * MIB] * 2
        set_options("per_process_memory_fraction:0.1")  # counts at CUDA's start only
        assert torch.cuda.get_per_process_memory_fraction() == 1.0
        with pytest.raises(NotModelled, match="expandable:False"):
            set_options("expandable:False")
        assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
        del x


def address(tensor) -> int:
    return tensor.untyped_storage()._record.block.address


@pytest.mark.usefixtures("workspaces_given_back")
def test_a_block_stays_as_long_as_another_stream_works_on_it():
    with virtual_gpus(1, memory="1 GiB"):
        torch.cuda.memory._record_memory_history()
        side, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
        b = torch.randn(2048, 2048, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a @ b
        b.record_stream(torch.cuda.current_stream())
        b.record_stream(side)
        where = address(b)
        del b
        stats = torch.cuda.memory_stats()
        assert stats["active_bytes.all.current"] == stats["allocated_bytes.all.current"] + 2048 * 2048 * 4
        early = torch.empty(2048, 2048, device="cuda")  # the host is far ahead of the product
        torch.cuda.synchronize()
        late = torch.empty(2048, 2048, device="cuda")
        assert address(early) != where == address(late)
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        actions = [event["action"] for event in events if event["addr"] == where]
        assert actions == ["segment_alloc", "alloc", "free_requested", "free_completed", "alloc"]


def test_a_thread_that_goes_on_after_the_gpus_are_off_leaves_nothing_behind():
    """Whether the GPUs had been used before, so that a folder was there, or not."""
    for used in (0, 512):
        registry = shared_memory.SharedMemoryRegistry("a test", 1)
        if used:
            registry.exchange(0, used)
        assert registry.folder.is_dir() == bool(used)
        registry.close()
        assert registry.exchange(0, used, most=1024, more=512) == (used, {})
        registry.exchange(0, 1024)
        assert not registry.folder.exists()
