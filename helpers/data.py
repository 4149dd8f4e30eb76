"""The training data of the lessons: images, and random words.

Nothing is downloaded. The bundled files are in the folder `data` beside this package. This module verifies their
checksums whenever it reads them. `data/README.md` gives their origin and licence.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from helpers.sizes import require_integer

__all__ = ["DamagedData", "Images", "fashion_mnist", "random_tokens"]

DATA = Path(__file__).resolve().parent.parent / "data"


class DamagedData(RuntimeError):
    """A data file is missing, incomplete or changed. The message says which file, and what to do."""


class Images(TensorDataset):
    """Images (N, channels, size, size) in float32 and labels (N,) in int64. `classes` has the name of each label."""

    def __init__(self, images: Tensor, labels: Tensor, classes: Iterable[str]):
        super().__init__(images, labels)
        self.classes = tuple(classes)


def _bundled(name: str) -> Path:
    """Return the path of a bundled file, by its name in SHA256SUMS. Raises DamagedData if a check fails."""
    path, sums = DATA / name, DATA / "SHA256SUMS"
    if not DATA.is_dir():
        raise DamagedData(
            f"There is no folder {DATA}. An installed package does not contain the data. Run `pip install -e .` in the "
            "course's folder to install the helpers in place."
        )
    if not path.is_file() or not sums.is_file():
        raise DamagedData(f"{path} or {sums} is missing. Run `git checkout data` in the course's folder.")
    lines = sums.read_text(encoding="utf-8").splitlines()
    if f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}" not in lines:
        raise DamagedData(f"The checksum of {path} is wrong. Run `git checkout data` in the course's folder.")
    return path


def fashion_mnist(channels: int = 3, size: int = 32, count: int | None = None) -> Images:
    """The 4,000 bundled photographs of clothes for training. Among all of them, the ten classes are equally frequent.

    The originals are normalized to mean 0 and standard deviation 1, which another size lowers a little. `channels` is
    1 (grey) or 3 (the grey image three times, for models that need colour images). `size` is the width and height in
    pixels (the originals have 28). `count` keeps only the first images. Raises DamagedData for a changed file, and
    ValueError for other values.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}.")
    size = require_integer("size", size)
    for part in ("train", "t10k"):  # torchvision checks that all four files exist
        _bundled(f"FashionMNIST/raw/{part}-images-idx3-ubyte")
        _bundled(f"FashionMNIST/raw/{part}-labels-idx1-ubyte")
    from torchvision.datasets import FashionMNIST  # here: it imports the compiler unless virtual GPUs are on

    raw = FashionMNIST(DATA)
    if count is not None:
        count = require_integer("count", count, most=len(raw))
    images = raw.data[:count].unsqueeze(1).expand(-1, channels, -1, -1).float() / 255
    images = (images - 0.289) / 0.354  # mean and standard deviation of the 4,000 images
    if images.shape[-1] != size:
        images = interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return Images(images.contiguous(), raw.targets[:count], raw.classes)


def random_tokens(batch: int, length: int, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    """Return random words: inputs and labels, both (batch, length) in int64."""
    return torch.randint(vocabulary_size, (batch, length)), torch.randint(vocabulary_size, (batch, length))
