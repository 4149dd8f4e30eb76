"""One training loop: on one GPU, with DataParallel on several GPUs, or in each of many ranks with DDP.

    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), loader, device="cuda:0")
    trainer = DataParallelTrainer(model, optimizer, nn.CrossEntropyLoss(), loader, devices=gpus)
    trainer = DistributedTrainer(model, optimizer, nn.CrossEntropyLoss(), loader)     # in each rank
    trainer.train(epochs=2)         # [cuda:0-3] epoch 0 | batch 128 | steps 32 | lr 0.1000 | loss 2.068 | ...

The loop is the same for images (logits (N, C), labels (N)) and for masked words (logits (N, T, V), labels (N, T), with
-100 where there is nothing to guess). Where to read on:

    loop          Trainer and DataParallelTrainer: epochs and steps
    ddp           DistributedTrainer
    scores        sums over batches and ranks, divided once at the end
    checkpoints   the files
"""

from helpers.train.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from helpers.train.ddp import DistributedTrainer
from helpers.train.loop import DataParallelTrainer, Trainer

__all__ = [
    "CheckpointError",
    "DataParallelTrainer",
    "DistributedTrainer",
    "Trainer",
    "load_checkpoint",
    "save_checkpoint",
]
