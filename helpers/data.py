"""What the lessons train on: images, text, and random batches.

Nothing is downloaded unless `cifar10` is called. The bundled files lie in the folder `data` beside this package, and
their checksums are compared whenever they are read; `data/README.md` names their origin and licence.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import datasets

DATA = Path(__file__).resolve().parent.parent / "data"
NOVEL = "pride_and_prejudice.txt"
PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100  # the label that torch.nn.functional.cross_entropy leaves out


class DamagedData(RuntimeError):
    """A data file is missing, incomplete or changed; the message says which and what to do."""


class Images(TensorDataset):
    """Images [N, channels, size, size] in float32, labels [N] in int64; `classes` names the labels."""

    def __init__(self, images: Tensor, labels: Tensor, classes: Iterable[str]):
        super().__init__(images, labels)
        self.classes = tuple(classes)


def bundled(name: str) -> Path:
    """The path of a bundled file, such as "pride_and_prejudice.txt", after its checksum was compared."""
    path, sums = DATA / name, DATA / "SHA256SUMS"
    if not DATA.is_dir():
        raise DamagedData(
            f"There is no folder {DATA}. The data are not part of an installed package: install the helpers in place, "
            "with `pip install -e .` in the course's folder."
        )
    if not path.is_file() or not sums.is_file():
        raise DamagedData(f"{path} or {sums} is missing. Run `git checkout data` in the course's folder.")
    lines = (line.split() for line in sums.read_text(encoding="utf-8").splitlines())
    expected = {file: checksum for checksum, file in lines}
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected.get(name):
        raise DamagedData(f"{path} was changed: its SHA-256 differs. Run `git checkout data` in the course's folder.")
    return path


# --- images -------------------------------------------------------------------------------------------------


def fashion_mnist(train: bool = True, channels: int = 3, size: int = 32, count: int | None = None) -> Images:
    """The bundled photographs of clothes: 4,000 to train on, 1,000 to test on, the classes equally frequent.

    Normalised to mean 0 and standard deviation 1. `channels` is 1 (grey) or 3 (the grey image three times, as networks
    for colour images want it); `size` is the side in pixels (the originals have 28); `count` keeps the first images
    only. Raises DamagedData where a file is not what was shipped.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}.")
    for part in ("train", "t10k"):  # torchvision wants all four files, whichever it reads
        bundled(f"FashionMNIST/raw/{part}-images-idx3-ubyte")
        bundled(f"FashionMNIST/raw/{part}-labels-idx1-ubyte")
    raw = datasets.FashionMNIST(DATA, train=train)
    return _images(raw.data.unsqueeze(1).expand(-1, channels, -1, -1), raw, [0.289], [0.354], size, count)


def cifar10(train: bool = True, root: str | Path | None = None, count: int | None = None) -> Images:
    """CIFAR-10: 50,000 colour photographs of 3 x 32 x 32 to train on, 10,000 to test on.

    Read from `root` (the folder `data` by default); torchvision downloads what is not there (170 MB). If no network
    answers, one printed sentence says so and the bundled images come instead.
    """
    try:
        raw = datasets.CIFAR10(root or DATA, train, download=True)
    except (OSError, RuntimeError) as error:
        print(f"CIFAR-10 could not be downloaded ({error}): the bundled Fashion-MNIST images are used instead.")
        return fashion_mnist(train, channels=3, size=32, count=count)
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    return _images(torch.from_numpy(raw.data).permute(0, 3, 1, 2), raw, mean, std, 32, count)


def _images(pixels: Tensor, raw: Any, mean: list[float], std: list[float], size: int, count: int | None) -> Images:
    """Pixels [N, channels, height, width] from 0 to 255, normalised per channel and brought to `size`."""
    if size < 1 or (count is not None and not 1 <= count <= len(pixels)):
        raise ValueError(f"size must be at least 1 and count from 1 to {len(pixels)}, not {size} and {count}.")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    images = (pixels[:count].float() / 255 - mean) / std
    if images.shape[-1] != size:
        images = interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return Images(images.contiguous(), torch.as_tensor(raw.targets)[:count], raw.classes)


# --- text ---------------------------------------------------------------------------------------------------


class Words:
    """A text cut into words. `tokens` lists the vocabulary, special tokens first; `ids` [N] is the text.

    Words outside the vocabulary become [UNK].
    """

    def __init__(self, text: str, vocabulary_size: int):
        if vocabulary_size <= len(SPECIAL_TOKENS):
            raise ValueError(f"vocabulary_size must be above {len(SPECIAL_TOKENS)}, the number of special tokens.")
        counted = Counter(self.split(text))
        by_frequency = sorted(counted, key=lambda word: (-counted[word], word))
        self.tokens = (*SPECIAL_TOKENS, *by_frequency[: vocabulary_size - len(SPECIAL_TOKENS)])
        self._index = {word: index for index, word in enumerate(self.tokens)}
        self.ids = self.encode(text)

    @staticmethod
    def split(text: str) -> list[str]:
        """Words in lower case, and punctuation marks."""
        return re.findall(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]", text.lower())

    def encode(self, text: str) -> Tensor:
        """The ids of a text, int64."""
        return torch.tensor([self._index.get(word, UNK) for word in self.split(text)], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.tokens)


def words(vocabulary_size: int = 8000) -> Words:
    """The bundled novel as `Words` with at most `vocabulary_size` tokens, the most frequent ones.

    The novel has fewer than 8,000 different words: `len(words())` is the size that a network needs.
    """
    return Words(bundled(NOVEL).read_text(encoding="utf-8"), vocabulary_size)


def masked_words(
    length: int = 64, vocabulary: Words | None = None, train: bool = True, chosen: float = 0.15, seed: int = 0
) -> TensorDataset:
    """Sequences for BERT's training task: guess the words that were hidden.

    Gives inputs [N, length] and labels [N, length], both int64. Each sequence is [CLS], length - 2 words,
    [SEP]; the last is filled with [PAD]. In each, a share `chosen` of the words is picked: of these 80 %
    become [MASK], 10 % a random word, 10 % stay. Labels hold the picked words and -100 elsewhere. The same
    `seed` gives the same sequences; `train` is the first 90 % of the text, the rest is for testing.
    """
    if length < 3 or not 0 < chosen <= 1:
        raise ValueError(f"length must be at least 3 and chosen in (0, 1], not {length} and {chosen}.")
    vocabulary = vocabulary or words()
    rows = [torch.tensor([CLS, *row.tolist(), SEP]) for row in vocabulary.ids.split(length - 2)]
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    split = round(0.9 * len(sequences))
    sequences = sequences[:split] if train else sequences[split:]
    return TensorDataset(*mask(sequences, len(vocabulary), chosen, torch.Generator().manual_seed(seed)))


def mask(sequences: Tensor, vocabulary_size: int, chosen: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and labels of the masked-word task for ids [N, length]; each row has at least one picked."""

    def random():
        return torch.rand(sequences.shape, generator=generator)

    hidable = (sequences != PAD) & (sequences != CLS) & (sequences != SEP)
    wanted = (hidable.sum(1, keepdim=True) * chosen).round().clamp(min=1)
    # The rank of a random score picks exactly `wanted` words; 2 keeps the special tokens out.
    picked = random().masked_fill(~hidable, 2.0).argsort(1).argsort(1) < wanted
    any_word = torch.randint(len(SPECIAL_TOKENS), vocabulary_size, sequences.shape, generator=generator)
    fate = random()
    inputs = sequences.masked_fill(picked & (fate < 0.8), MASK)
    inputs = torch.where(picked & (fate >= 0.8) & (fate < 0.9), any_word, inputs)
    return inputs, sequences.masked_fill(~picked, IGNORED)


# --- random batches and loading -----------------------------------------------------------------------------

Device = torch.device | str | int


def random_images(batch: int, size: int = 32, classes: int = 10, device: Device = "cpu") -> tuple[Tensor, Tensor]:
    """Noise made on `device`: images [batch, 3, size, size] in float32, labels [batch] in int64."""
    return torch.randn(batch, 3, size, size, device=device), torch.randint(classes, (batch,), device=device)


def random_tokens(
    batch: int, length: int = 64, vocabulary_size: int = 8000, device: Device = "cpu"
) -> tuple[Tensor, Tensor]:
    """Random words made on `device`, none special: inputs and labels [batch, length], both int64."""
    shape, special = (batch, length), len(SPECIAL_TOKENS)
    inputs = torch.randint(special, vocabulary_size, shape, device=device)
    return inputs, torch.randint(special, vocabulary_size, shape, device=device)


def loader(dataset: Dataset, batch_size: int, shuffle: bool = False, seed: int = 0, **options: Any) -> DataLoader:
    """A DataLoader whose order depends on `seed` alone: the same in every run, and another one in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, batch_size, shuffle=shuffle, generator=generator, **options)
