"""Helpers of the multi-GPU course. The map:

    gpus           use_gpus: real GPUs where there are enough, else virtual ones; the machine; figures of kinds of GPUs
    data           images (bundled Fashion-MNIST, or CIFAR-10) and words
    models         the networks of the lessons
    train          one training loop: on one GPU, with DataParallel, or as one of many ranks with DDP; checkpoints
    parallel       one function on several ranks, and one rank among others; the loss where the outputs are; pipelines
    tensor_parallel  one matrix over several ranks, in columns or rows
    memory         memory readings per GPU, from GPUtil and from torch.cuda; what was refused; the largest batch
    monitor        memory over time: every allocation of a run, its phases, its peak and what held it
    timeline       who works when: modelled on virtual GPUs, torch.profiler's record on real ones
    waiting        steps in which GPUs wait, for lesson 07's exercise
    oom            out of memory: what is on a GPU, who keeps it, how it lies there, how large a batch may be
    plots          readings in, matplotlib axes out
    widgets        panels: sliders for a job's memory on every GPU, memory while a training runs
    check          the checks of the exercises
    lesson04       the article's BERT under any wrapper: peak memory of a step
    methods        every way to train one job: memory, modelled time, utilisation, the largest batch
    scaling        from one rank to 64 GPUs: strong and weak scaling, Amdahl, logs of real runs
    advice         which method to take, with reasons in numbers: guide, picture, panel
    intervals      intervals of time, merged and added up
    virtual        virtual GPUs: everything that makes `cuda:3` answer on a laptop

Importing has no side effect; `use_gpus` switches GPUs on.
"""

from helpers.gpus import use_gpus

__all__ = ["use_gpus"]
