"""Published images per second of networks for pictures, beside modelled ones: rows of timm's tables on three GPUs.

    python -m benchmarks.timm_rows                  # the wide sample, about four minutes; needs the package timm
    python -m benchmarks.timm_rows fit held         # other sets of rows
    python -m benchmarks.timm_rows --only resnext

The figures are results/benchmark-*.csv of github.com/huggingface/pytorch-image-models (Apache-2.0), a part of which is
kept in reference/timm_rows.json: network, batch, pixels, images per second, million parameters. A file's name says what
was measured: training or inference, autocast in fp16, channels last (nhwc) or first, PyTorch, CUDA and GPU. The
networks are timm's, without weights, and a step is that of its benchmark.py. Attention is written out for PyTorch 1.12.

How the rows were chosen, before anything was computed (a file's rows are numbered from 0):
- wide, only to report: every 33rd row of training on RTX 3090 from row 16 on, every 120th of inference on RTX 4090 from
  60 on, every 200th on RTX 5090 from 100 on.
- fit: the same from row 0 on. For the other order of channels and GPU, every 83rd row of training on RTX 3090 with
  channels first, and every 240th of inference on RTX 4090 with them first and RTX 3090 with them last, from row 0 on.
- held, only to report: the last three files, half a stride later.
- phones and groups, for the fit: training rows of networks with depthwise or grouped convolutions, chosen by name.

A row is left out if timm no longer has the network, or has another one under its name: its parameters differ by more
than 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from virtual_gpus import record_timeline, virtual_gpus

TABLE = json.loads((Path(__file__).parent / "reference" / "timm_rows.json").read_text())
KINDS = {"rtx3090": "RTX 3090", "rtx4090": "RTX 4090", "4090": "RTX 4090", "5090": "RTX 5090"}


def network(name: str, pixels: int) -> nn.Module:
    """timm's network without weights, made for images of so many pixels if its sizes depend on them."""
    import timm

    config = timm.get_pretrained_cfg(name)
    usual = {size[-1] for size in (config.input_size, config.test_input_size) if size} if config else {pixels}
    if pixels not in usual or (config and config.fixed_input_size and pixels != config.input_size[-1]):
        try:
            return timm.create_model(name, img_size=pixels)
        except TypeError:
            pass  # convolutions take images of any size
    return timm.create_model(name)


def stepping(net: nn.Module, images: torch.Tensor, trains: bool) -> Callable[[], None]:
    """A step as timm's benchmark.py has it."""
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2(net.train(trains), opt="sgd", lr=1e-4)

    def train() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            output = net(images)
            output = output[0] if isinstance(output, tuple) else output
            classes = torch.empty(len(images), device="cuda", dtype=torch.long).random_(output.shape[-1])
            nn.functional.cross_entropy(output, classes).backward()
        optimizer.step()

    def infer() -> None:
        with torch.inference_mode(), torch.autocast("cuda", torch.float16):
            net(images)

    return train if trains else infer


def per_second(file: str, name: str, batch: int, pixels: int, millions: float) -> float | None:
    """Modelled images per second. None if timm's network of this name is another one now."""
    from timm.layers import set_fused_attn

    set_fused_attn("-pt112-" not in file)
    layout = torch.channels_last if "-nhwc-" in file else torch.contiguous_format
    with virtual_gpus(1, kind=KINDS[file.rpartition("-")[2]], memory="900 GiB", shapes_only=True):
        with torch.device("cuda"):
            net = network(name, pixels).to(memory_format=layout)
        if abs(sum(p.numel() for p in net.parameters()) / 1e6 / millions - 1) > 0.02:
            return None
        images = torch.zeros(batch, 3, pixels, pixels, device="cuda").contiguous(memory_format=layout)
        step = stepping(net, images, file.startswith("train"))
        step()
        torch.cuda.synchronize()
        with record_timeline() as timeline:
            step()
            torch.cuda.synchronize()
    return batch / timeline.seconds


def rows(names: list[str], only: str = "") -> Iterator[tuple[str, str, float, float]]:
    """(file, network, published, modelled images per second) of the rows that can be run."""
    for name in names:
        for file, lines in TABLE["sets"][name].items():
            for model, batch, pixels, real, millions in lines:
                if only not in model:
                    continue
                try:
                    found = per_second(file, model, batch, pixels, millions)
                except RuntimeError as error:  # timm's word for a network it does not know
                    if "Unknown model" not in str(error):
                        raise
                    found = None
                if found is None:
                    print(f"{file}: timm no longer has {model}")
                else:
                    yield file, model, real, found


def main() -> None:
    """Print the table and the medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timm_rows", description=__doc__.split("\n\n")[0])
    parser.add_argument("sets", nargs="*", default=["wide"], help=f"of: {', '.join(TABLE['sets'])}")
    parser.add_argument("--only", default="", help="networks with this in their names")
    options = parser.parse_args()
    errors: dict[str, list[float]] = {}
    for file, model, real, found in rows(options.sets, options.only):
        errors.setdefault(file, []).append(found / real - 1)
        print(f"{file:36} {model:34} {real:9.0f} {found:9.0f} {100 * (found / real - 1):+6.0f} %", flush=True)
    errors["all"] = [error for found in errors.values() for error in found]
    for file, found in errors.items():
        size, middle = statistics.median(map(abs, found)), statistics.median(found)
        print(f"{file:36} {len(found):3} networks, median error {100 * size:.1f} %, middle {100 * middle:+.1f} %")


if __name__ == "__main__":
    main()
