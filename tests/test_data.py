"""helpers/data.py: bundled images and text, CIFAR-10 from a tiny file set, no network anywhere."""

import hashlib
import pickle
import re
import shutil
import urllib.request
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import datasets

from helpers import data

# --- bundled files ---------------------------------------------------------------------------------------


def test_every_checksum_is_right_and_in_the_readme():
    sums = [line.split() for line in (data.DATA / "SHA256SUMS").read_text().splitlines()]
    readme = re.findall(r"\| `(\S+)` \| `([0-9a-f]{64})` \|", (data.DATA / "README.md").read_text(encoding="utf-8"))
    assert readme == [(file, checksum) for checksum, file in sums]
    assert len(sums) == 5
    for _, file in sums:
        assert data.bundled(file).is_file()


def test_the_bundled_files_are_small():
    images = sum(path.stat().st_size for path in (data.DATA / "FashionMNIST").rglob("*") if path.is_file())
    assert images < 4e6 and (data.DATA / data.NOVEL).stat().st_size < 1e6


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    """A copy of data/ that a test may damage."""
    copy = tmp_path / "data"
    shutil.copytree(data.DATA, copy, ignore=shutil.ignore_patterns("cifar*"))
    monkeypatch.setattr(data, "DATA", copy)
    return copy


def test_one_changed_byte_is_noticed(own_data):
    path = own_data / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(data.DamagedData, match="train-images-idx3-ubyte was changed.*git checkout data"):
        data.fashion_mnist()


def test_a_missing_file_is_named(own_data):
    (own_data / data.NOVEL).unlink()
    with pytest.raises(data.DamagedData, match="pride_and_prejudice.txt.* missing.*git checkout data"):
        data.words()


def test_helpers_that_were_installed_without_the_course_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "DATA", tmp_path / "site-packages" / "data")
    with pytest.raises(data.DamagedData, match="There is no folder .*pip install -e ."):
        data.fashion_mnist()


# --- images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("train", "per_class"), [(True, 400), (False, 100)])
def test_fashion_mnist_is_balanced_and_normalised(train, per_class):
    images, labels = data.fashion_mnist(train, channels=1, size=28).tensors
    assert images.shape == (10 * per_class, 1, 28, 28) and images.dtype == torch.float32
    assert labels.dtype == torch.int64 and labels.bincount().tolist() == [per_class] * 10
    assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02


def test_fashion_mnist_holds_the_pixels_that_torchvision_reads():
    raw = datasets.FashionMNIST(data.DATA, train=False)
    images, labels = data.fashion_mnist(train=False, channels=1, size=28).tensors
    assert torch.equal((images[:, 0] * 0.354 + 0.289).mul(255).round().byte(), raw.data)
    assert torch.equal(labels, raw.targets)


def test_fashion_mnist_in_the_form_for_colour_networks():
    dataset = data.fashion_mnist(train=False, count=7)
    image, label = dataset[0]
    assert len(dataset) == 7 and image.shape == (3, 32, 32)
    assert torch.equal(image[0], image[2])
    assert dataset.classes[label] in datasets.FashionMNIST.classes


def test_the_first_images_mix_the_classes():
    assert data.fashion_mnist(count=100).tensors[1].bincount(minlength=10).min() > 0


@pytest.mark.parametrize("wrong", [{"channels": 2}, {"size": 0}, {"count": 0}, {"count": 4001}])
def test_fashion_mnist_refuses_what_it_cannot_give(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        data.fashion_mnist(**wrong)


# --- CIFAR-10 --------------------------------------------------------------------------------------------


def batch(images, seed):
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (images, 3072), dtype=np.uint8)
    return {"data": pixels, "labels": generator.integers(0, 10, images).tolist()}


@pytest.fixture
def tiny_cifar(tmp_path, monkeypatch):
    """Two training batches, a test batch and the names, in CIFAR-10's format."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    content = {name: batch(4, seed) for seed, name in enumerate(["data_batch_1", "data_batch_2", "test_batch"])}
    content["batches.meta"] = {"label_names": [f"class {i}" for i in range(10)]}
    files = {}
    for name, value in content.items():
        (folder / name).write_bytes(pickle.dumps(value))
        files[name] = [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [files["data_batch_1"], files["data_batch_2"]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [files["test_batch"]])
    monkeypatch.setattr(datasets.CIFAR10, "meta", datasets.CIFAR10.meta | {"md5": files["batches.meta"][1]})
    return tmp_path


def test_cifar10_from_files_that_are_there(tiny_cifar, capsys):
    train, test = data.cifar10(root=tiny_cifar), data.cifar10(train=False, root=tiny_cifar, count=3)
    assert train.tensors[0].shape == (8, 3, 32, 32) and len(test) == 3
    assert train.classes[0] == "class 0" and capsys.readouterr().out == ""
    red = torch.tensor(batch(4, 0)["data"][0, :1024]).view(32, 32)
    assert torch.allclose(train[0][0][0], (red / 255 - 0.4914) / 0.2470, atol=1e-5)
    assert train.tensors[1][:4].tolist() == batch(4, 0)["labels"]


def test_no_network_gives_a_sentence_and_the_bundled_images(tmp_path, monkeypatch, capsys):
    def unreachable(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    found = data.cifar10(train=False, root=tmp_path)
    sentence = capsys.readouterr().out
    assert "CIFAR-10 could not be downloaded (" in sentence and "no route to host" in sentence
    assert "Fashion-MNIST images are used instead." in sentence
    assert torch.equal(found.tensors[0], data.fashion_mnist(train=False).tensors[0])


# --- text ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary():
    return data.words()


def test_words_of_the_novel(vocabulary):
    assert vocabulary.tokens[:5] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert len(vocabulary) == len(set(vocabulary.tokens)) < 8000
    assert len(vocabulary.ids) > 120_000 and data.UNK not in vocabulary.ids
    said = [vocabulary.tokens[index] for index in vocabulary.ids[8:19]]
    assert " ".join(said) == "it is a truth universally acknowledged , that a single man"


def test_words_encode(vocabulary):
    ids = vocabulary.encode('"_You_ want to tell me," said Zarathustra')
    assert " ".join(vocabulary.tokens[index] for index in ids) == '" you want to tell me , " said [UNK]'
    assert vocabulary.encode("").tolist() == []


def test_a_small_vocabulary_keeps_the_frequent_words():
    small = data.words(vocabulary_size=100)
    assert len(small) == 100 and "the" in small.tokens and "netherfield" not in small.tokens
    assert data.UNK in small.ids
    with pytest.raises(ValueError, match="vocabulary_size must be above 5"):
        data.words(vocabulary_size=5)


def test_masked_words_have_berts_shares(vocabulary):
    inputs, labels = data.masked_words(64, vocabulary).tensors
    assert inputs.shape == labels.shape and inputs.shape[1] == 64
    picked = labels != data.IGNORED
    words = inputs[picked]

    def share(condition):
        return condition.float().mean().item()

    assert (picked.sum(1) == round(0.15 * 62)).all()
    assert share(words == data.MASK) == pytest.approx(0.8, abs=0.01)
    assert share(words == labels[picked]) == pytest.approx(0.1, abs=0.01)
    assert words[words != data.MASK].min() > data.MASK  # random words are never special tokens


def test_masked_words_leave_the_rest_as_it_was(vocabulary):
    inputs, labels = data.masked_words(64, vocabulary).tensors
    original = torch.where(labels == data.IGNORED, inputs, labels)
    assert (original[:, 0] == data.CLS).all() and (original[:, -1] == data.SEP).all()
    assert torch.equal(original[:, 1:-1].flatten(), vocabulary.ids[: original[:, 1:-1].numel()])


def test_train_and_test_are_parts_of_one_text(vocabulary):
    train, test = (data.masked_words(64, vocabulary, train) for train in (True, False))
    assert len(train) + len(test) == -(-len(vocabulary.ids) // 62)
    assert 8.9 < len(train) / len(test) < 9.1
    last, labels = test.tensors[0][-1], test.tensors[1][-1]
    assert last[-1] == data.PAD and (labels[last == data.PAD] == data.IGNORED).all()


def test_masked_words_depend_on_the_seed_alone(vocabulary):
    first, same, other = (data.masked_words(64, vocabulary, seed=seed).tensors[0] for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_every_row_has_something_to_guess():
    sequences = torch.tensor([[data.CLS, 9, data.SEP], [data.CLS, 10, data.SEP]])
    _, labels = data.mask(sequences, 20, 0.15, torch.Generator().manual_seed(0))
    assert labels.tolist() == [[-100, 9, -100], [-100, 10, -100]]


@pytest.mark.parametrize("wrong", [{"length": 2}, {"chosen": 0}, {"chosen": 1.5}])
def test_masked_words_refuse_what_they_cannot_give(wrong, vocabulary):
    with pytest.raises(ValueError, match="length must be at least 3 and chosen in"):
        data.masked_words(vocabulary=vocabulary, **wrong)


# --- random batches and loading --------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_random_batches(device):
    images, labels = data.random_images(6, size=8, classes=4, device=device)
    assert images.shape == (6, 3, 8, 8) and labels.shape == (6,) and images.device.type == device
    inputs, targets = data.random_tokens(6, length=5, vocabulary_size=30, device=device)
    assert inputs.shape == targets.shape == (6, 5) and inputs.dtype == targets.dtype == torch.int64
    if device == "cpu":
        assert labels.max() < 4 and 5 <= inputs.min() and inputs.max() < 30


def test_the_loader_shuffles_the_same_way_in_every_run_and_otherwise_in_every_epoch():
    numbers = torch.arange(10)

    def epochs(seed):
        batches = data.loader(numbers, 4, shuffle=True, seed=seed)
        return [torch.cat(list(batches)).tolist() for _ in range(2)]

    first, second = epochs(0)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert epochs(0) == [first, second] and epochs(1)[0] != first


def test_the_loader_hands_on_options():
    assert [len(batch) for batch in data.loader(torch.arange(10), 4, drop_last=True)] == [4, 4]
