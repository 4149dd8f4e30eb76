"""The package that the lessons import. Each module imports only modules that stand above it in this map:

    engine               The names of the virtual GPUs' package that the modules below take.
    sizes                `format_bytes`: bytes and numbers as text.
    gpus                 `use_gpus` gives real GPUs where there are enough of them, and virtual ones otherwise.
    data                 `fashion_mnist`, and `random_tokens` for language models.
    models               From `relu_net` to `Llama`, the networks of the lessons.
    train                `train_epochs`, the training loop: on one device, with DataParallel, or with DDP.
    parallel.launching   `launch` and `run_hosts` start ranks, one process each.
    parallel.pipeline    `Pipeline` sends micro-batches through stages on several GPUs.
    measure.refusal      `Refusal`: the request that failed, read from PyTorch's error.
    measure.readings     `Reading` and `Readings`: the memory of GPUs at one moment.
    measure.memory       `read_memory`, `measure_memory`: PyTorch's figures and GPUtil's; `fits` and `largest_batch`.
    measure.oom          `explain_oom` says why a GPU ran out of memory, and what would have helped.
    measure.timeline     `record_timeline` records what each GPU does. `describe_time_use` says what it waits for.
    show.style           The `COLOURS` and hatches of pictures, and their text alternatives.
    show.bars            `memory_bars` draws the memory of each GPU, and `describe_memory` says it.
    show.panel           `Panel` shows a picture that depends on sliders.
    show.live            `live_memory` shows the memory of every GPU during training.
    show.explore         `explore` shows the memory of any training job, with sliders for its sizes.
    show.segments        `draw_segments` shows how PyTorch's allocator divides the memory of a GPU.
    show.timelines       `timeline_bars` draws what each GPU did, and when.
    show.programs        `show_diff` shows how two programs differ.

The packages `parallel`, `measure` and `show` offer the names that lessons and pages use, with the classes of what they
return. The checks of the exercises also take names from the modules. Only `engine` imports the package of the virtual
GPUs. Importing has no side effect; `use_gpus` switches GPUs on.
"""

from helpers.gpus import use_gpus

__all__ = ["use_gpus"]
