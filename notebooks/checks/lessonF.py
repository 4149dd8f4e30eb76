"""Checks of the final task: a budget, the same job on several GPUs, faults by their symptoms, a safe checkpoint."""

import contextlib
import os
import random
import tempfile
from pathlib import Path
from pickle import UnpicklingError
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from notebooks.checks import compare
from notebooks.checks.core import NotYet, call, exercise, given, require, show
from notebooks.checks.gpus import in_ranks, need_gpus, plain

BATCH = 32
SAFE = "Write another file in the same folder, and give it the name with os.replace when it is complete."
CAUSES = ("other GPU", "kept graph", "same samples", "missing collective", "no module.")
FAULTS = {"a": "missing collective", "b": "other GPU", "c": "kept graph", "d": "same samples", "e": "no module."}


@exercise
def budget(answer):
    """Task 1: `answer(parameters, ranks, sharded)` gives the bytes of weights, gradients and AdamW states on a GPU."""
    for ranks, sharded in ((3, False), (8, False), (4, True), (64, True)):
        parameters = random.randrange(10**8, 10**10) // ranks * ranks
        right = 16 * parameters // (ranks if sharded else 1)
        mistakes = {
            right * 5 // 4: "counts DDP's buckets, or one tensor too many. The gradients lie in the buckets here.",
            right // 2: "leaves out the two states of AdamW, or counts 2 bytes for a float32 number.",
            right * 3 // 4: "leaves out the gradients, the weights, or one of the two states of AdamW.",
            16 * parameters: "is what DDP holds. With `fully_shard`, each GPU holds its share.",
            16 * parameters // ranks: "is the share of one rank. With DDP, each GPU holds everything.",
        }
        mistakes.pop(right, None)
        case = f"With {parameters:,} parameters on {ranks} GPUs and {'`fully_shard`' if sharded else 'DDP'}, "
        compare.number(call(answer, parameters, ranks, sharded), right, "bytes", mistakes=mistakes, case=case)
    return "16 bytes per parameter: on each GPU with DDP, and divided among the GPUs with `fully_shard`."


def net() -> nn.Module:
    """The network of the job."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


@exercise
def ranked(answer):
    """Task 2: `answer(rank, ranks, images, labels)` trains as `one_gpu` does, each rank on its part of each batch."""
    need_gpus(4, values=True)
    for ranks in (2, 4):
        count = 2 * BATCH + ranks + random.randrange(1, max(2, ranks - 1))  # the last batch is not divisible by `ranks`
        torch.manual_seed(count)
        images, labels = torch.randn(count, 1, 28, 28), torch.randint(10, (count,))
        found = in_ranks(_train_in_rank, (answer, ranks, images, labels), ranks, timeout=30)
        weights, rows, returned, where = zip(*found, strict=True)
        for model, value in zip(weights, returned, strict=True):
            require(model is not None, f"It returned {given(value, answer)}. Return the model.")
        for rank, gpu in enumerate(where):
            require(gpu == f"cuda:{rank}", f"The model of rank {rank} is on {gpu}. It should be on cuda:{rank}.")
        why = "Were the gradients added up over the ranks before every step?"
        for other in weights[1:]:
            compare.alike(other, weights[0], "The weights of the ranks differ, and are", why, rel=1e-6)
        least = count // ranks - 2
        what = f"{ranks} ranks computed {sum(rows)} images, rank 0 {rows[0]} of them. The batches have {count} in all."
        require(sum(rows) == count and min(rows) >= least, what, "Divide each batch among the ranks.")
        mistakes = {
            "The mean of the ranks' means is not the mean of the batch if the parts differ in size. Weight them.":
                _on_one_device(images, labels, ranks, equal=True),
            "The gradients are too large by the number of ranks. Were they added up twice?":
                _on_one_device(images, labels, ranks, scale=ranks),
            "That is what the sum of the ranks' mean losses gives. Divide, or weight each rank's share.":
                _on_one_device(images, labels, ranks, equal=True, scale=ranks),
            "DDP divides the sum of the ranks' gradients by their number. Multiply the loss by it.":
                _on_one_device(images, labels, ranks, scale=1 / ranks),
        }  # fmt: skip
        what = f"With {ranks} ranks and {count} images, the weights are, compared with those of one GPU,"
        why = "Compare seed, optimizer, learning rate, loss and batches with those of `one_gpu`."
        compare.alike(weights[0], _on_one_device(images, labels, ranks), what, why, mistakes)
    return "2 and 4 ranks end with the weights of one GPU, although the last batch is not divisible."


def _train_in_rank(rank: int, work) -> tuple[Tensor | None, int, object, str]:
    """The learner's function in a rank: the weights, how many images the net saw, what it returned, and its GPU."""
    answer, ranks, images, labels = work
    seen = []
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: seen.append(len(inputs[0])) if getattr(module, "in_features", 0) == 784 else None
    )
    torch.manual_seed(rank + 1)  # so that a missing torch.manual_seed(0) shows
    try:
        model = answer(rank, ranks, images, labels)
    finally:
        hook.remove()
    is_model = isinstance(model, nn.Module)
    shards = [parameter.detach() for parameter in model.parameters()] if is_model else []
    whole = [shard.full_tensor() if isinstance(shard, DTensor) else shard for shard in shards]
    vector = nn.utils.parameters_to_vector(whole) if is_model else None
    dist.barrier()
    return None if vector is None else vector.cpu(), sum(seen), plain(model), str(getattr(vector, "device", ""))


def _on_one_device(images: Tensor, labels: Tensor, ranks: int, equal: bool = False, scale: float = 1) -> Tensor:
    """The weights that `one_gpu` reaches on the CPU. equal: with the mean of the ranks' means as the loss."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        optimizer.zero_grad()
        parts = zip(x.tensor_split(ranks), y.tensor_split(ranks), strict=True) if equal else [(x, y)]
        losses = [cross_entropy(model(part), label) for part, label in parts]
        (scale * sum(losses) / len(losses)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@exercise
def faults(answer):
    """Task 3: `answer` maps each symptom's letter to one of CAUSES."""
    require(isinstance(answer, dict), f"{show(answer)} is not a dict.")
    compare.names(answer, FAULTS, "a cause")
    for letter, cause in answer.items():
        require(
            cause in CAUSES,
            f"({letter}) {show(cause)} is none of the causes. Copy one of {', '.join(map(repr, CAUSES))}.",
        )
    wrong = [letter for letter in FAULTS if answer[letter] != FAULTS[letter]]
    many = f"{len(FAULTS) - len(wrong)} of {len(FAULTS)} causes are right."
    require(
        not wrong,
        many,
        "See lessons 01 (device errors), 02 (checkpoints), 04 (samplers, hangs) and 06 (graphs that are kept).",
    )
    return "Each symptom has its cause."


@exercise
def saved(answer):
    """Task 4: `answer(path, model, optimizer)` saves a DataParallel or DDP model safely."""
    gpu = need_gpus(1, values=True)[0]
    model = nn.DataParallel(nn.Linear(3, 2).to(gpu), device_ids=[gpu])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4, 3, device=gpu)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        require(
            answer(path, model, optimizer) is not ..., "`save` still returns `...`. Replace the dots with your answer."
        )
        require(path.is_file(), f"There is no file {path.name} after the call. Write to the path that you are given.")
        files = sorted(file.name for file in Path(folder).iterdir())
        require(files == [path.name], f"The folder has {', '.join(files)}. Leave nothing except the checkpoint.")
        before = path.read_bytes()
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            whole = "Save what `state_dict()` returns, and not the network or the optimizer itself."
            raise NotYet("`torch.load` with `weights_only=True` cannot read the file.", whole) from error
        keys = "It should be a dict with the keys model and optimizer."
        require(isinstance(found, dict) and {"model", "optimizer"} <= set(found), f"The file has {show(found)}.", keys)
        named = [key for key in found["model"] if key.startswith("module.")]
        require(not named, f"The key {named[:1]} begins with `module.`, so a plain network cannot load it.",
                "Save the network that is inside.")  # fmt: skip
        plain_net = nn.Linear(3, 2)
        plain_net.load_state_dict(found["model"])
        again = "They should be those of the network when `save` is called."
        compare.alike(plain_net.parameters(), model.parameters(), "The weights in the file are", again, rel=1e-6)
        require(
            bool(found["optimizer"].get("state")), "The optimizer has no momentum in the file. Save its state_dict."
        )
        torch.optim.SGD(plain_net.parameters(), lr=0.1).load_state_dict(found["optimizer"])
        with torch.no_grad():
            model.module.weight.add_(1)  # the next file differs, also if all of it is written
        _interrupted(answer, path, model, optimizer)
        safe = path.is_file() and path.read_bytes() == before
        require(safe and _takes_its_name(answer, path, model, optimizer), "A program that is killed while it saves "
                "loses the old checkpoint.", SAFE)  # fmt: skip
    return "The file loads into a plain network, and a program that is killed leaves the old file as it was."


def _takes_its_name(answer, path: Path, *arguments) -> bool:
    """Call `answer`: whether the old file is untouched, and has its name until a file of the same folder takes it."""
    before, link = path.read_bytes(), path.with_name("link")
    with contextlib.suppress(OSError):  # file systems without hard links
        os.link(path, link)  # a second name of the old file, which shows what is written into it
    complete = []

    def watch(real):
        def rename(src, dst, **options):
            if Path(dst) == path:
                near = path.parent.resolve() in Path(src).resolve().parents
                complete.append(near and path.is_file() and path.read_bytes() == before)
            return real(src, dst, **options)

        return rename

    with patch.multiple(os, replace=watch(os.replace), rename=watch(os.rename)):
        answer(path, *arguments)
    return (not link.exists() or link.read_bytes() == before) and all(complete)


class _Killed(BaseException):
    pass


def _interrupted(answer, *arguments) -> None:
    """Call `answer`, and end it when torch.save has written half of the file."""
    whole = torch.save

    def half(obj, f, *args, **kwargs):
        whole(obj, f, *args, **kwargs)
        if isinstance(f, str | Path):
            Path(f).write_bytes(Path(f).read_bytes()[:100])
        raise _Killed

    torch.save = half
    try:
        answer(*arguments)
    except _Killed:
        return
    finally:
        torch.save = whole
    what = "Your function goes on after a `torch.save` that fails, or does not call it by this name."
    raise NotYet(what, "The check watches `torch.save`.")
