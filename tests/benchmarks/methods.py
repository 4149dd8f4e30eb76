"""Steps of lesson 07, against which tests hold the decision guide: `python -m tests.benchmarks.methods`, two minutes.

Writes tests/data/methods.json: every method on both jobs and six kinds of cards (`helpers.lesson07.compare`), and DDP
on 1 to 64 A100s (`lesson07`); bytes on the fullest GPU, and modelled seconds. With `--show` it prints in place
of that what the guide says beside the stored figures.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from helpers.gpus import modelled_gpus
from helpers.lesson07.advice import peak_bytes, step_seconds
from helpers.lesson07.methods import BERT, PYRAMIDNET, TrainStep, compare
from helpers.lesson07.nets import NETS
from helpers.lesson07.scaling import Cluster, rank_step

STORED = Path(__file__).parents[1] / "data" / "methods.json"
# The three of lesson 07, and three that nobody looked at when the formulas were written.
MACHINES = {kind: Cluster(kind) for kind in ("K80", "TITAN Xp", "A100", "V100", "T4", "H200")}
NETWORKS = {name: Cluster("A100", 8, network=name) for name in ("InfiniBand HDR", "Ethernet 25", "Ethernet 10")}
STRONG, COUNTS = {BERT: 256, PYRAMIDNET: 512}, (1, 2, 4, 8, 16, 32, 64)


def steps():
    """A dict per step of section 2's table."""
    found = compare(MACHINES, [BERT, PYRAMIDNET])
    return [
        {"machine": name, "job": job, "method": row.method, "batch": row.batch, "gpus": len(row.peaks),
         "bytes": max(row.peaks), "seconds": row.seconds}
        for (name, job), rows in found.items() for row in rows if row.method != "model parallel"
    ]  # fmt: skip


def strong():
    """A dict per step of DDP on more and more GPUs, whose batch stays."""
    for job, batch in STRONG.items():
        with modelled_gpus(1, "A100", "1 TiB") as (gpu,):
            net = job.build().to(gpu)
            for gpus in COUNTS:
                rank = rank_step(net, partial(_step_of, job, gpu, batch // gpus), gpu)
                for name, cluster in NETWORKS.items():
                    found = {"network": name, "job": job.name, "batch": batch, "gpus": gpus}
                    yield found | {"seconds": rank.on(gpus, cluster)}


def _step_of(job, gpu, batch, ddp):
    return partial(TrainStep(job, ddp, partial(job.loss, ddp, gpu=gpu)), batch)


def said(step):
    """(bytes, seconds) that the guide says of a stored step."""
    net = NETS[f"{step['job']} of the article"]
    cluster = NETWORKS[step["network"]] if "network" in step else MACHINES[step["machine"]]
    what = net, step.get("method", "DDP"), step["batch"], step["gpus"], cluster
    return peak_bytes(*what), step_seconds(*what)


def show():
    """The guide beside what is stored."""
    for step in json.loads(STORED.read_text())["steps"]:
        nbytes, seconds = said(step)
        print(f"{step['job']:10} {step['machine']:8} {step['method']:13} {step['bytes'] / 2**30:6.2f} GiB, said "
              f"{nbytes / 2**30:6.2f} ({nbytes / step['bytes'] - 1:+6.1%}); {1e3 * step['seconds']:5.0f} ms, said "
              f"{1e3 * seconds:5.0f} ({seconds / step['seconds']:.2f})")  # fmt: skip
    for step in json.loads(STORED.read_text())["strong"]:
        seconds = said(step)[1]
        print(f"{step['job']:10} {step['network']:14} {step['gpus']:2} GPUs: {1e3 * step['seconds']:5.0f} ms, said "
              f"{1e3 * seconds:5.0f} ({seconds / step['seconds']:.2f})")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="store nothing; print the guide's errors")
    if parser.parse_args().show:
        return show()
    torch.set_num_threads(1)
    lines = {name: ",\n  ".join(map(json.dumps, rows)) for name, rows in (("steps", steps()), ("strong", strong()))}
    STORED.write_text("{" + ",\n".join(f'"{name}": [\n  {rows}\n]' for name, rows in lines.items()) + "}\n")


if __name__ == "__main__":
    main()
