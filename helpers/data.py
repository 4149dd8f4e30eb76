"""What the lessons train on: images, text, and random batches.

Nothing is downloaded. The bundled files lie in the folder `data` beside this package, and their checksums are compared
whenever they are read. `data/README.md` names their origin and licence.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

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
    if size < 1 or (count is not None and not 1 <= count <= len(raw)):
        raise ValueError(f"size must be at least 1 and count from 1 to {len(raw)}, not {size} and {count}.")
    images = (raw.data[:count].unsqueeze(1).expand(-1, channels, -1, -1).float() / 255 - 0.289) / 0.354
    if images.shape[-1] != size:
        images = interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return Images(images.contiguous(), raw.targets[:count], raw.classes)


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


def masked_words(length: int, vocabulary: Words, train: bool = True) -> TensorDataset:
    """Sequences for BERT's training task, which is to guess the words that were hidden.

    Gives inputs [N, length] and labels [N, length], both int64, the same in every call. Each sequence is [CLS],
    length - 2 words, [SEP]; the last is filled with [PAD]. In each, 15 % of the words are picked, and at least one. Of
    these 80 % become [MASK], 10 % a random word, and 10 % stay. Labels hold the picked words and -100 elsewhere.
    `train` is the first 90 % of the text; the rest is for testing.
    """
    if length < 3:
        raise ValueError(f"length must be at least 3, for one word between [CLS] and [SEP], not {length}.")
    rows = [torch.tensor([CLS, *row.tolist(), SEP]) for row in vocabulary.ids.split(length - 2)]
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    split = round(0.9 * len(sequences))
    return TensorDataset(*_mask(sequences[:split] if train else sequences[split:], len(vocabulary)))


def _mask(sequences: Tensor, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random():
        return torch.rand(sequences.shape, generator=generator)

    hidable = (sequences != PAD) & (sequences != CLS) & (sequences != SEP)
    wanted = (hidable.sum(1, keepdim=True) * 0.15).round().clamp(min=1)
    # The rank of a random score picks exactly `wanted` words; 2 keeps the special tokens out.
    picked = random().masked_fill(~hidable, 2.0).argsort(1).argsort(1) < wanted
    any_word = torch.randint(len(SPECIAL_TOKENS), vocabulary_size, sequences.shape, generator=generator)
    fate = random()
    inputs = sequences.masked_fill(picked & (fate < 0.8), MASK)
    inputs = torch.where(picked & (fate >= 0.8) & (fate < 0.9), any_word, inputs)
    return inputs, sequences.masked_fill(~picked, IGNORED)


# --- random batches and loading -----------------------------------------------------------------------------


def random_images(batch: int) -> tuple[Tensor, Tensor]:
    """Noise in the form of CIFAR-10: images [batch, 3, 32, 32] in float32, labels [batch] in int64, below 10."""
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def random_tokens(batch: int, length: int, vocabulary_size: int) -> tuple[Tensor, Tensor]:
    """Random words, none special: inputs and labels [batch, length], both int64."""
    shape, special = (batch, length), len(SPECIAL_TOKENS)
    inputs = torch.randint(special, vocabulary_size, shape)
    return inputs, torch.randint(special, vocabulary_size, shape)


def loader(dataset: Dataset, batch_size: int, shuffle: bool = False) -> DataLoader:
    """A DataLoader whose order is the same in every run, and another one in every epoch."""
    return DataLoader(dataset, batch_size, shuffle=shuffle, generator=torch.Generator().manual_seed(0))
