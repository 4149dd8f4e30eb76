"""Helpers of the multi-GPU course. The map:

    devices        use_gpus: real GPUs where the machine has enough, else virtual ones; what the machine is
    data           images (bundled Fashion-MNIST, or CIFAR-10) and words
    models         the networks of the lessons
    training       one training loop, on one GPU or under DataParallel; checkpoints beside it
    parallel_loss  the loss where the outputs are: DataParallelModel and its criterion, loss inside forward
    memory         memory readings per GPU, from GPUtil and from torch.cuda
    monitor        memory over time: every allocation of a run, its phases, its peak and what held it
    plots          readings in, matplotlib axes out
    check          the checks of the exercises
    virtual        virtual GPUs: everything that makes `cuda:3` answer on a laptop

Importing has no side effect; `use_gpus` switches GPUs on.
"""

from helpers.devices import use_gpus

__all__ = ["use_gpus"]
