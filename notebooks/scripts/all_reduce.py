"""Measure the links between GPUs: the bus bandwidth of an all-reduce, and copies between pairs of ranks. See lesson 12.

    torchrun --standalone --nproc-per-node 4 all_reduce.py             # on the CPU if there are no GPUs
    torchrun --standalone --nproc-per-node 4 all_reduce.py --pairs     # also each pair, to find the slow one
    torchrun --standalone --nproc-per-node 4 -m virtual_gpus --gpus 4 --kind H100 --shapes-only all_reduce.py

The bus bandwidth is what each link of a ring carries: 2 (n - 1) / n times the bytes, divided by the seconds, with n
ranks. Compare it with one direction of the slowest link, as data sheets of NVLink add both. On virtual GPUs, the times
are modelled. Over several machines, start the program on each as torchrun asks; what NCCL chose is in the lines of
NCCL_DEBUG=INFO.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

# LOCAL_RANK numbers the processes on this machine, RANK those on all machines. GPUs are numbered per machine.
LOCAL_RANK = os.environ.get("LOCAL_RANK", "0")
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu")


def seconds_of(work, repeats):
    """The median of the seconds of `work()`, after a first time that does not count."""
    work()
    found = []
    for _ in range(repeats):
        dist.barrier()  # all ranks begin together, so that nobody measures how late another one is
        if DEVICE.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def slowest(seconds):
    """The largest value of all ranks."""
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, seconds)
    return max(values)


def all_reduce_line(nbytes, repeats):
    """A line with the time and the bus bandwidth for one size."""
    ranks = dist.get_world_size()
    tensor = torch.zeros(nbytes // 4, device=DEVICE)
    seconds = slowest(seconds_of(lambda: dist.all_reduce(tensor), repeats))
    bus = 2 * (ranks - 1) / ranks * nbytes / seconds / 1e9
    return f"bytes={nbytes} ms={1e3 * seconds:.3f} algbw={nbytes / seconds / 1e9:.2f} busbw={bus:.2f}"


def pair_bandwidth(first, second, nbytes, repeats):
    """GB/s from one rank to another, known to all ranks; the others wait."""
    tensor = torch.zeros(nbytes // 4, device=DEVICE)

    def send():
        if dist.get_rank() == first:
            dist.send(tensor, second)
        elif dist.get_rank() == second:
            dist.recv(tensor, first)

    return nbytes / slowest(seconds_of(send, repeats)) / 1e9


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--least", type=int, default=2**16, help="the smallest size in bytes")
    parser.add_argument("--most", type=int, default=2**28, help="the largest size in bytes")
    parser.add_argument("--repeats", type=int, default=5, help="how often each size is measured")
    parser.add_argument("--pairs", action="store_true", help="also send between each pair of ranks")
    args = parser.parse_args()
    if not 4 <= args.least <= args.most:
        raise SystemExit(f"--least {args.least} must be at least 4, and at most --most {args.most}.")
    if args.repeats < 1:
        raise SystemExit(f"--repeats is {args.repeats}. It must be at least 1.")
    return args


def main():
    args = parse_arguments()
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise SystemExit(f"Start two ranks or more: torchrun --standalone --nproc-per-node 2 {__file__}")
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")

    nbytes = args.least
    while nbytes <= args.most:
        line = all_reduce_line(nbytes, args.repeats)
        if dist.get_rank() == 0:
            print(f"all-reduce ranks={dist.get_world_size()} {line} GB/s", flush=True)
        nbytes *= 4
    if args.pairs:
        for first in range(dist.get_world_size()):
            for second in range(first + 1, dist.get_world_size()):
                found = pair_bandwidth(first, second, args.most, args.repeats)
                if dist.get_rank() == 0:
                    print(f"pair {first} {second} {found:.2f} GB/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
