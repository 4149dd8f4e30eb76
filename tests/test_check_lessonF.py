"""The checks of the final task: right and wrong answers of each task."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from notebooks.checks import lessonF as check
from tests.check_answers import STRANGE_RESULTS, Answers, answers_test, copied, from_a_buffer, into_an_open_file, stored

pytestmark = pytest.mark.usefixtures("four_of_16_gib")


@pytest.fixture
def same_numbers(monkeypatch):
    """Each answer gets the same images."""
    monkeypatch.setattr(check.random, "randrange", lambda low, high: low)


ranked = stored("F_final_task", "ranked_solution", dist=dist, fully_shard=fully_shard)
WRAPPER, STEP = "DistributedDataParallel(model, device_ids=[rank])", "optimizer.step()"
SUMMED = f"[dist.all_reduce(each.grad) for each in model.parameters()], {STEP}"


def without_a_file_for_a_moment(old, new):
    new.unlink(missing_ok=True)
    os.rename(old, new)


def restored_afterwards(state, path):
    old = path.read_bytes() if path.exists() else b""
    try:
        torch.save(state, path)
    except BaseException:
        path.write_bytes(old)
        raise


WAYS = copied, from_a_buffer, into_an_open_file, without_a_file_for_a_moment, restored_afterwards
save = stored("F_final_task", "save_solution", **{each.__name__: each for each in WAYS})
WRITE, WEIGHTS = "torch.save(state, temporary)\n    os.replace(temporary, path)", "model.module.state_dict()"
RIGHT, LOSES = check.FAULTS, "loses the old checkpoint"
TABLE = {
    "budget": Answers(
        check.budget,
        right=[lambda p, r, s: 16 * p // (r if s else 1), lambda p, r, s: 16.0 * p / r**s],
        wrong=[
            (lambda p, r, s: 16 * p, "with `fully_shard`, each gpu holds its share"),
            (lambda p, r, s: 16 * p / r, "with ddp, each gpu holds everything"),
            (lambda p, r, s: 8 * p / r**s, "leaves out the two states"),
            (lambda p, r, s: 12 * p / r**s, "one of the two states of adamw"),
            (lambda p, r, s: 16 * p / r**s / 2**30, "is less than half"),
        ],
    ),
    "ranked": Answers(
        check.ranked,
        right=[
            ranked(".tensor_split(ranks)[rank]", "[rank::ranks]", WRAPPER, "model", "* ranks", "", STEP, SUMMED),
            ranked(WRAPPER, "fully_shard(model)"),  # averages the gradients as DDP does
        ],
        wrong=[
            (ranked("* ranks / len(x)", "/ len(part)"), "is not the mean of the batch if the parts differ"),
            (ranked(".tensor_split(ranks)[rank]", ""), "Divide each batch"),
            (ranked(WRAPPER, "model"), "gradients added up"),
            (ranked(".to(rank)", ".to(0)", "[rank])\n    opt", "[0])\n    opt"), "Duplicate GPU detected"),
            (ranked("torch.manual_seed(0)", "pass"), "Compare seed"),
            (ranked("* ranks", ""), "Multiply the loss by it"),
            (ranked("* ranks", "* ranks**2"), "added up twice"),
            (ranked("len(x)", "len(part)"), "the sum of the ranks' mean losses"),
            (ranked("return model", "model[1].bias.data.add_(rank // 2)\n    return model"), "of the ranks differ"),
            (lambda rank, ranks, images, labels: [1], "Return the model"),
            (lambda rank, ranks, images, labels: ..., "still returns"),
        ],
        strange=STRANGE_RESULTS[:1],
        fixtures="same_numbers",
        ranks=(2, 4),
    ),
    "faults": Answers(
        check.faults,
        right=[dict(RIGHT)],
        wrong=[
            (dict.fromkeys(RIGHT, "other GPU"), "1 of 5 causes are right"),
            (RIGHT | {"a": "a hang"}, "(a) 'a hang' is none of the causes"),
            ({"a": "kept graph"}, "b"),
        ],
    ),
    "saved": Answers(
        check.saved,
        right=[
            save("torch.save(", "into_an_open_file("),
            save("torch.save(", "from_a_buffer(", "os.replace(temporary, path)", "temporary.replace(path)"),
            save("torch.save(state, temporary)", "torch.save(obj=state, f=temporary)"),
        ],
        wrong=[
            *(
                (save(WRITE, f"{way}(state, path)"), LOSES)
                for way in ("torch.save", "into_an_open_file", "from_a_buffer")
            ),
            (save("os.replace", "copied"), LOSES),
            (save("os.replace", "without_a_file_for_a_moment"), LOSES),
            (save("torch.save(", "path.unlink(missing_ok=True)\n    torch.save("), LOSES),
            (save(WRITE, "restored_afterwards(state, path)"), LOSES),
            (
                save("os.replace", 'path.with_name("old.pt").touch()\n    os.replace'),
                "Leave nothing except the checkpoint",
            ),
            (save(WEIGHTS, "torch.nn.Linear(3, 2).state_dict()"), "weights in the file"),
            (save(WEIGHTS, "model.module"), "cannot read the file"),
            (save(WEIGHTS, "model.state_dict()"), "begins with `module.`"),
            (save("state = {", f"state = {WEIGHTS} or {{"), "keys model and optimizer"),
            (save("optimizer.state_dict()", "{}"), "no momentum"),
            (lambda path, model, optimizer: None, "There is no file"),
        ],
    ),
}
test_answers = answers_test(TABLE)
