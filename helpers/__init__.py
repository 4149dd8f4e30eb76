"""Helpers of the multi-GPU course. The map:

    gpus           use_gpus: real GPUs where there are enough, else virtual ones; the machine; figures of kinds of GPUs
    data           images (bundled Fashion-MNIST, or CIFAR-10) and words
    models         the networks of the lessons
    train          one training loop: on one GPU, with DataParallel, or as one of many ranks with DDP; checkpoints
    parallel       one function on several ranks, and one rank among others; the loss where the outputs are; pipelines
    tensor_parallel  one matrix over several ranks, in columns or rows
    measure        memory per GPU, now, as peaks and event by event; the largest batch; who works when; out of memory
    waiting        steps in which GPUs wait, for lesson 07's exercise
    plots          readings in, matplotlib axes out
    widgets        panels: sliders for a job's memory on every GPU, memory while a training runs
    check          the checks of the exercises
    lesson04       the article's BERT under any wrapper: peak memory of a step
    methods        every way to train one job: memory, modelled time, utilisation, the largest batch
    scaling        from one rank to 64 GPUs: strong and weak scaling, Amdahl, logs of real runs
    advice         which method to take, with reasons in numbers: guide, picture, panel
    virtual        virtual GPUs: everything that makes `cuda:3` answer on a laptop

Importing has no side effect; `use_gpus` switches GPUs on.
"""

from helpers.gpus import use_gpus

__all__ = ["use_gpus"]
