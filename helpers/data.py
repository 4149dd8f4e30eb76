"""What the lessons train on: images, text, and random batches.

Nothing is downloaded unless `cifar10` is called. The bundled files lie in `data/` beside this package and are
checked against their checksums whenever they are read; `data/README.md` names their origin and licence.
"""

import hashlib
import os
import re
import socket
import tempfile
from collections import Counter
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import torch
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, TensorDataset
from torchvision import datasets

DATA = Path(__file__).resolve().parent.parent / "data"
NOVEL = "pride_and_prejudice.txt"
GET_AGAIN = "Run `git checkout data` in the course's folder; the helpers belong there (`pip install -e .`)."
PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100  # the label that torch.nn.functional.cross_entropy leaves out


class DamagedData(RuntimeError):
    """A data file is missing, incomplete or changed; the message says which and what to do."""


class Images(TensorDataset):
    """Images [N, channels, size, size] in float32, labels [N] in int64; `classes` names the labels."""

    def __init__(self, images, labels, classes):
        super().__init__(images, labels)
        self.classes = tuple(classes)


# --- images -------------------------------------------------------------------------------------------------


def fashion_mnist(train=True, channels=3, size=32, count=None):
    """The bundled photographs of clothes: 4,000 to train on, 1,000 to test on, the classes equally frequent.

    Gives `Images`, normalised to mean 0 and standard deviation 1. `channels` is 1 (grey) or 3 (the grey image
    three times, as networks for colour images want it); `size` is the side in pixels (the originals have 28);
    `count` keeps the first images only. Raises DamagedData where a file is not what was shipped.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, not {channels}")
    for part in ("train", "t10k"):  # torchvision wants all four files, whichever it reads
        bundled(f"FashionMNIST/raw/{part}-images-idx3-ubyte")
        bundled(f"FashionMNIST/raw/{part}-labels-idx1-ubyte")
    raw = datasets.FashionMNIST(DATA, train=train)
    return _images(raw.data.unsqueeze(1).expand(-1, channels, -1, -1), raw, [0.289], [0.354], size, count)


def cifar10(train=True, root=None, count=None, timeout=20):
    """CIFAR-10: 50,000 colour photographs of 3 x 32 x 32 to train on, 10,000 to test on, as `Images`.

    Read from `root` (the folder `data/` unless told), where the unpacked files or the archive may lie;
    else fetched by torchvision (170 MB), once. Where no network answers within `timeout` seconds, one
    printed sentence says so and the bundled images come instead. Damaged files in `root` raise DamagedData.
    """
    root = Path(root or DATA)
    try:
        raw = _open_cifar10(root, train, timeout)
    except (OSError, HTTPException, RuntimeError) as error:
        if isinstance(error, DamagedData):
            raise
        print(f"CIFAR-10 could not be fetched ({error}): the bundled Fashion-MNIST images are used instead.")
        return fashion_mnist(train, channels=3, size=32, count=count)
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    return _images(torch.from_numpy(raw.data).permute(0, 3, 1, 2), raw, mean, std, 32, count)


def _images(pixels, raw, mean, std, size, count):
    """Pixels [N, channels, height, width] from 0 to 255, normalised per channel and brought to `size`."""
    if size < 1 or (count is not None and not 1 <= count <= len(pixels)):
        raise ValueError(f"size must be at least 1 and count from 1 to {len(pixels)}, not {size} and {count}")
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    images = (pixels[:count].float() / 255 - mean) / std
    if images.shape[-1] != size:
        images = interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return Images(images.contiguous(), torch.as_tensor(raw.targets)[:count], raw.classes)


def _open_cifar10(root, train, timeout):
    """torchvision's dataset from the files in `root`, fetched first where there are none."""
    unpacked, archive = root / datasets.CIFAR10.base_folder, root / datasets.CIFAR10.filename
    if not unpacked.exists() and not archive.exists():
        _fetch_cifar10(root, timeout)
    try:
        return datasets.CIFAR10(root, train, download=not unpacked.exists() and _is_cifar10_archive(archive))
    except RuntimeError as error:
        damaged = unpacked if unpacked.exists() else archive
        raise DamagedData(f"{damaged} is damaged or incomplete: delete it and try again.") from error


def _fetch_cifar10(root, timeout):
    """Put the unpacked files into `root`. An interrupted download leaves nothing behind there."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as unfinished, _socket_timeout(timeout):
        datasets.CIFAR10(unfinished, download=True)
        os.replace(Path(unfinished) / datasets.CIFAR10.base_folder, root / datasets.CIFAR10.base_folder)


def _is_cifar10_archive(path):
    """False for a damaged archive, which torchvision would silently fetch anew."""
    return datasets.utils.check_integrity(path, datasets.CIFAR10.tgz_md5)


@contextmanager
def _socket_timeout(seconds):
    """torchvision opens its connections without a limit of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def bundled(name):
    """The path of a bundled file, such as "pride_and_prejudice.txt", once its checksum is found right."""
    path, sums = DATA / name, DATA / "SHA256SUMS"
    if not path.is_file() or not sums.is_file():
        raise DamagedData(f"{path} or {sums} is missing. {GET_AGAIN}")
    lines = (line.split() for line in sums.read_text(encoding="utf-8").splitlines())
    expected = {file: checksum for checksum, file in lines}
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected.get(name):
        raise DamagedData(f"{path} is not the file that was shipped: its SHA-256 differs. {GET_AGAIN}")
    return path


# --- text ---------------------------------------------------------------------------------------------------


class Words:
    """A text cut into words. `tokens` lists the vocabulary, special tokens first; `ids` [N] is the text.

    `encode` turns text into ids (int64), `decode` turns ids back; words outside the vocabulary become [UNK].
    """

    def __init__(self, text, vocabulary_size):
        if vocabulary_size <= len(SPECIAL_TOKENS):
            raise ValueError(f"vocabulary_size must be above {len(SPECIAL_TOKENS)}, the number of special tokens")
        counted = Counter(self.split(text))
        by_frequency = sorted(counted, key=lambda word: (-counted[word], word))
        self.tokens = (*SPECIAL_TOKENS, *by_frequency[: vocabulary_size - len(SPECIAL_TOKENS)])
        self._index = {word: index for index, word in enumerate(self.tokens)}
        self.ids = self.encode(text)

    @staticmethod
    def split(text):
        """Words in lower case, and punctuation marks."""
        return re.findall(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]", text.lower())

    def encode(self, text):
        return torch.tensor([self._index.get(word, UNK) for word in self.split(text)], dtype=torch.int64)

    def decode(self, ids):
        return " ".join(self.tokens[index] for index in ids)

    def __len__(self):
        return len(self.tokens)


def words(vocabulary_size=8000):
    """The bundled novel as `Words` with at most `vocabulary_size` tokens, the most frequent ones.

    The novel has fewer than 8,000 different words: `len(words())` is the size that a network needs.
    """
    return Words(bundled(NOVEL).read_text(encoding="utf-8"), vocabulary_size)


def masked_words(length=64, vocabulary=None, train=True, chosen=0.15, seed=0):
    """Sequences for BERT's training task: guess the words that were hidden.

    Gives inputs [N, length] and labels [N, length], both int64. Each sequence is [CLS], length - 2 words,
    [SEP]; the last is filled with [PAD]. In each, a share `chosen` of the words is picked: of these 80 %
    become [MASK], 10 % a random word, 10 % stay. Labels hold the picked words and -100 elsewhere. The same
    `seed` gives the same sequences; `train` is the first 90 % of the text, the rest is for testing.
    """
    if length < 3 or not 0 < chosen <= 1:
        raise ValueError(f"length must be at least 3 and chosen in (0, 1], not {length} and {chosen}")
    vocabulary = vocabulary or words()
    sequences = _sequences(vocabulary.ids, length)
    split = round(0.9 * len(sequences))
    sequences = sequences[:split] if train else sequences[split:]
    return TensorDataset(*mask(sequences, len(vocabulary), chosen, torch.Generator().manual_seed(seed)))


def _sequences(ids, length):
    """[CLS] words [SEP], row by row: [N, length]."""
    rows = [torch.cat([torch.tensor([CLS]), row, torch.tensor([SEP])]) for row in ids.split(length - 2)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def mask(sequences, vocabulary_size, chosen, generator):
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


def random_images(batch, size=32, classes=10, device="cpu", channels=3):
    """Noise made on `device`: images [batch, channels, size, size] in float32, labels [batch] in int64."""
    images = torch.randn(batch, channels, size, size, device=device)
    return images, torch.randint(classes, (batch,), device=device)


def random_tokens(batch, length=64, vocabulary_size=8000, device="cpu"):
    """Random words made on `device`, none special: inputs and labels [batch, length], both int64."""
    shape, special = (batch, length), len(SPECIAL_TOKENS)
    inputs = torch.randint(special, vocabulary_size, shape, device=device)
    return inputs, torch.randint(special, vocabulary_size, shape, device=device)


def loader(dataset, batch_size, shuffle=False, seed=0, drop_last=False, workers=0, pin_memory=False):
    """A DataLoader whose order depends on `seed` alone: the same in every run, another in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(
        dataset,
        batch_size,
        shuffle=shuffle,
        generator=generator,
        drop_last=drop_last,
        num_workers=workers,
        pin_memory=pin_memory,
    )
