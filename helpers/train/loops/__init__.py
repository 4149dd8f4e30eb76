"""One training loop: on one GPU, with DataParallel on several, or as one of many ranks.

    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), loader, device="cuda:0")
    trainer = DataParallelTrainer(model, optimizer, nn.CrossEntropyLoss(), loader, devices=gpus)
    trainer = DistributedTrainer(model, optimizer, nn.CrossEntropyLoss(), loader)     # in each rank
    trainer.train(epochs=2)         # [cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.1000 | loss 2.068 | ...
    trainer.evaluate(test_loader)   # Score(loss=..., accuracy=...)

The loop is the same for images (logits (N, C), labels (N)) and for masked words (logits (N, T, V), labels (N,
T), -100 where there is nothing to guess). Where to read on:

    loop             Trainer: epochs, steps, evaluation
    dp               DataParallelTrainer
    ddp              DistributedTrainer
    micro_batches    what each batch of a step counts: accumulation, ranks, the sampler's padding
    precision        autocast, the scaled loss of float16, clipping
    state            snapshots in the middle of an epoch, and going on from them
    checkpoints      the file
    ranks            one rank among others
"""

from helpers.train.loops.ddp import DistributedTrainer
from helpers.train.loops.dp import DataParallelTrainer
from helpers.train.loops.loop import Trainer

__all__ = ["DataParallelTrainer", "DistributedTrainer", "Trainer"]
