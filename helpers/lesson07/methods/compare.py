"""All methods on all jobs and machines, in processes of their own: part of `helpers.lesson07.methods`.

Each process has virtual GPUs of its own and computes in shapes only, so that GPUs of several kinds can be compared
whatever GPUs this process has.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from helpers.gpus import is_virtual, modelled_gpus
from helpers.lesson07.methods.jobs import BERT, PYRAMIDNET, Job
from helpers.lesson07.methods.measure import METHODS, Row, measure
from helpers.lesson07.scaling import Cluster

# Of every GPU: more than any method needs, so that what does not fit can be compared as well, and so much more that
# two processes, which share their cards, never run into each other. The search has limits of its own.
MEMORY = "4 TiB"
# What runs in one process, one after the other: such as meet the same shapes. The longest first.
_GROUPS = (("DataParallel", "parallel loss"), ("pipeline", "model parallel"), ("one GPU", "DDP"))
_JOBS = {job.name: job for job in (BERT, PYRAMIDNET)}


def compare(
    clusters: Mapping[str, Cluster],
    jobs: Sequence[Job] = (PYRAMIDNET, BERT),
    methods: Sequence[str] = METHODS,
    gpus: int = 4,
    search: bool = True,
    processes: int = 2,
) -> dict[tuple[str, str], list[Row]]:
    """{(name of the cluster, name of the job): a `Row` per method}, as `measure` gives them on `gpus` GPUs.

    search: with the largest batch that fits. Takes some seconds for each job and cluster on two cores. In a program
    call it under `if __name__ == "__main__":`, as the processes may be spawned. Raises ValueError for a job that is not
    one of the course's two, or an unknown method.
    """
    unknown = [job.name for job in jobs if _JOBS.get(job.name) is not job]
    if unknown or not set(methods) <= set(METHODS):
        raise ValueError(f"compare knows the jobs BERT and PYRAMIDNET and the methods {', '.join(METHODS)}")
    groups = [[method for method in methods if method in group] for group in _GROUPS]
    tasks = [(job.name, tuple(group)) for group in groups for job in jobs if group]
    with warnings.catch_warnings(), ProcessPoolExecutor(processes, mp_context=_context()) as pool:
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        futures = [pool.submit(_rows, dict(clusters), *task, gpus, search) for task in tasks]
        found = {key: row for future in futures for key, row in future.result().items()}
    return {
        (name, job.name): [found[name, job.name, method] for method in methods] for job in jobs for name in clusters
    }


def _context():
    """Forked processes have PyTorch already; but one that inherits CUDA cannot be used."""
    forks = sys.platform == "linux" and (is_virtual() or not torch.cuda.is_available())
    return multiprocessing.get_context("fork" if forks else "spawn")


def _rows(clusters: Mapping[str, Cluster], job: str, methods: Sequence[str], gpus: int, search: bool) -> dict:
    """In a process: {(cluster, job, method): row}."""
    torch.set_num_threads(1)
    like_new = replace(_JOBS[job], build=partial(deepcopy, _JOBS[job].build()))  # initialising takes longer
    found: dict[tuple[str, str, str], Row] = {}
    before = None
    for name, cluster in clusters.items():
        for method in methods:
            like = found.get((before, job, method)) if search else None
            with modelled_gpus(gpus, cluster.kind, MEMORY, cluster.links) as devices:
                gc.collect()
                gc.freeze()  # imports and known shapes need not be looked through after every step
                found[name, job, method] = measure(like_new, method, devices, cluster, search=search, like=like)
        before = name
    gc.unfreeze()
    return found
