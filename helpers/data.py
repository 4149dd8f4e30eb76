"""The training data of the lessons: images, text, and random batches.

Nothing is downloaded. The bundled files are in the folder `data` beside this package. Their checksums are verified
whenever they are read. `data/README.md` gives their origin and licence.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import TensorDataset

DATA = Path(__file__).resolve().parent.parent / "data"
NOVEL = "pride_and_prejudice.txt"
PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores


class DamagedData(RuntimeError):
    """A data file is missing, incomplete or changed. The message says which file, and what to do."""


class Images(TensorDataset):
    """Images (N, channels, size, size) in float32 and labels (N,) in int64. `classes` has the name of each label."""

    def __init__(self, images: Tensor, labels: Tensor, classes: Iterable[str]):
        super().__init__(images, labels)
        self.classes = tuple(classes)


def bundled(name: str) -> Path:
    """Return the path of a bundled file, such as "pride_and_prejudice.txt". Raises DamagedData if a check fails."""
    path, sums = DATA / name, DATA / "SHA256SUMS"
    if not DATA.is_dir():
        raise DamagedData(
            f"There is no folder {DATA}. An installed package does not contain the data. Run `pip install -e .` in the "
            "course's folder to install the helpers in place."
        )
    if not path.is_file() or not sums.is_file():
        raise DamagedData(f"{path} or {sums} is missing. Run `git checkout data` in the course's folder.")
    lines = (line.split() for line in sums.read_text(encoding="utf-8").splitlines())
    expected = {file: checksum for checksum, file in lines}
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected.get(name):
        raise DamagedData(f"The checksum of {path} is wrong. Run `git checkout data` in the course's folder.")
    return path


# --- images -------------------------------------------------------------------------------------------------


def fashion_mnist(channels: int = 3, size: int = 32, count: int | None = None) -> Images:
    """The 4,000 bundled photographs of clothes for training. The ten classes are equally frequent.

    The images are normalized to mean 0 and standard deviation 1. `channels` is 1 (grey) or 3 (the grey image three
    times, for models that need colour images). `size` is the width and height in pixels (the originals have 28).
    `count` keeps only the first images. Raises DamagedData for a changed file, and ValueError for other values.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}.")
    for part in ("train", "t10k"):  # torchvision checks that all four files exist
        bundled(f"FashionMNIST/raw/{part}-images-idx3-ubyte")
        bundled(f"FashionMNIST/raw/{part}-labels-idx1-ubyte")
    from torchvision.datasets import FashionMNIST  # here, since it imports the compiler unless virtual GPUs are on

    raw = FashionMNIST(DATA)
    if size < 1 or (count is not None and not 1 <= count <= len(raw)):
        raise ValueError(f"size={size} must be at least 1, and count={count} must be from 1 to {len(raw)}.")
    images = (raw.data[:count].unsqueeze(1).expand(-1, channels, -1, -1).float() / 255 - 0.289) / 0.354
    if images.shape[-1] != size:
        images = interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return Images(images.contiguous(), raw.targets[:count], raw.classes)


# --- text ---------------------------------------------------------------------------------------------------


def masked_words(length: int, vocabulary_size: int) -> TensorDataset:
    """Return sequences of the bundled novel for BERT's training task, which is to predict hidden words.

    Inputs and labels are (N, length) in int64 and the same in every call. A sequence is [CLS], length - 2 words, [SEP].
    In each sequence, 15 % of the words are picked, and at least one. Of these, 80 % become [MASK], 10 % become a random
    word, and 10 % do not change. Labels are the picked words, and -100 elsewhere. The vocabulary has the special tokens
    and the most frequent words. Other words are [UNK]. The last 10 % of the novel are left out, for a test. Raises
    ValueError for a length below 3, and for a vocabulary that has only special tokens.
    """
    if length < 3:
        raise ValueError(f"length must be at least 3, for one word between [CLS] and [SEP], not {length}.")
    special = len(SPECIAL_TOKENS)
    if vocabulary_size <= special:
        raise ValueError(f"vocabulary_size must exceed {special}, the number of special tokens.")
    text = bundled(NOVEL).read_text(encoding="utf-8").lower()
    words = re.findall(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]", text)  # and punctuation marks
    counted = Counter(words)
    by_frequency = sorted(counted, key=lambda word: (-counted[word], word))[: vocabulary_size - special]
    ids = {word: special + place for place, word in enumerate(by_frequency)}
    rows = round(0.9 * len(words) / (length - 2))
    sequences = torch.tensor([ids.get(word, UNK) for word in words[: rows * (length - 2)]]).view(rows, length - 2)
    sequences = pad(pad(sequences, (1, 0), value=CLS), (0, 1), value=SEP)

    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(sequences.shape, generator=generator)
    scores[:, [0, -1]] = 2.0  # [CLS] and [SEP] are not picked
    picked = scores.argsort(1).argsort(1) < max(1, round(0.15 * (length - 2)))
    any_word = torch.randint(special, special + len(ids), sequences.shape, generator=generator)
    fate = torch.rand(sequences.shape, generator=generator)
    inputs = sequences.masked_fill(picked & (fate < 0.8), MASK)
    inputs = torch.where(picked & (fate >= 0.8) & (fate < 0.9), any_word, inputs)
    return TensorDataset(inputs, sequences.masked_fill(~picked, IGNORED))


# --- random batches -----------------------------------------------------------------------------------------


def random_images(batch: int) -> tuple[Tensor, Tensor]:
    """Return noise with the shapes of CIFAR-10: images (batch, 3, 32, 32) in float32, labels (batch,) in int64."""
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def random_tokens(batch: int, length: int, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    """Return random words without special tokens: inputs and labels, both (batch, length) in int64."""
    shape, special = (batch, length), len(SPECIAL_TOKENS)
    inputs = torch.randint(special, vocabulary_size, shape)
    return inputs, torch.randint(special, vocabulary_size, shape)
