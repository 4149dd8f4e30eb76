"""The benchmark of DistributedTrainer runs and prints its table. Times are never asserted."""

import torch
from torch import nn

from tests.benchmarks import ddp_cost


def test_the_table_has_a_row_per_job():
    tiny = (lambda: nn.Linear(6, 3), lambda: (torch.randn(8, 6), torch.arange(8) % 3), 4)
    table = ddp_cost.table(rounds=2, epochs=1, jobs={"tiny": tiny})
    assert [line.split(" | ")[0] for line in table] == [
        "| an epoch of DistributedTrainer on 2 ranks",
        "|---|---|---|---|",
        "| tiny",
    ]
    assert table[2].count(" to ") == 3
