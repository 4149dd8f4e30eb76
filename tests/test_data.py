"""helpers/data.py: bundled images and text."""

import re
import shutil

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
    shutil.copytree(data.DATA, copy)
    monkeypatch.setattr(data, "DATA", copy)
    return copy


def test_one_changed_byte_is_noticed(own_data):
    path = own_data / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(data.DamagedData, match="The checksum of .*train-images-idx3-ubyte is wrong.*git checkout data"):
        data.fashion_mnist()


def test_a_missing_file_is_named(own_data):
    (own_data / data.NOVEL).unlink()
    with pytest.raises(data.DamagedData, match="pride_and_prejudice.txt.* missing.*git checkout data"):
        data.masked_words(32, 100)


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


# --- text ------------------------------------------------------------------------------------------------


def original(vocabulary_size):
    """The sequences before words were hidden."""
    inputs, labels = data.masked_words(64, vocabulary_size).tensors
    return torch.where(labels == data.IGNORED, inputs, labels)


def test_masked_words_are_the_novel_between_cls_and_sep():
    sequences = original(8000)
    assert (sequences[:, 0] == data.CLS).all() and (sequences[:, -1] == data.SEP).all()
    ids = sequences[:, 1:-1].flatten().tolist()
    assert len(ids) > 120_000 and min(ids) == 5  # no special token, and the most frequent word
    said = "pride and prejudice by jane austen chapter 1 it is a truth universally acknowledged , that a single man"
    pairs = set(zip(said.split(), ids, strict=False))
    assert len(pairs) == len(set(said.split())) == len({number for _, number in pairs})


def test_a_small_vocabulary_keeps_the_frequent_words():
    small, large = original(100), original(8000)
    known = small != data.UNK
    assert torch.equal(small[known], large[known]) and small.max() == 99 and large[~known].min() == 100


def test_masked_words_have_berts_shares():
    inputs, labels = data.masked_words(64, 8000).tensors
    assert inputs.shape == labels.shape and inputs.shape[1] == 64
    picked = labels != data.IGNORED
    words = inputs[picked]

    def share(condition):
        return condition.float().mean().item()

    assert (picked.sum(1) == round(0.15 * 62)).all()
    assert share(words == data.MASK) == pytest.approx(0.8, abs=0.01)
    assert share(words == labels[picked]) == pytest.approx(0.1, abs=0.01)
    assert words[words != data.MASK].min() > data.MASK  # random words are never special tokens


def test_masked_words_are_the_same_in_every_call():
    first, same = (data.masked_words(64, 100).tensors[0] for _ in range(2))
    assert torch.equal(first, same)


def test_every_row_has_something_to_guess():
    _, labels = data.masked_words(3, 100).tensors
    assert ((labels != data.IGNORED) == torch.tensor([False, True, False])).all()


def test_masked_words_refuse_what_has_no_word():
    with pytest.raises(ValueError, match="length must be at least 3"):
        data.masked_words(2, 100)
    with pytest.raises(ValueError, match="vocabulary_size must exceed 5"):
        data.masked_words(64, 5)


# --- random batches and loading --------------------------------------------------------------------------


def test_random_batches():
    images, labels = data.random_images(6)
    assert images.shape == (6, 3, 32, 32) and labels.shape == (6,) and labels.max() < 10
    inputs, targets = data.random_tokens(6, length=5, vocabulary_size=30)
    assert inputs.shape == targets.shape == (6, 5) and inputs.dtype == targets.dtype == torch.int64
    assert 5 <= inputs.min() and inputs.max() < 30 and not torch.equal(inputs, targets)


def test_the_loader_shuffles_the_same_way_in_every_run_and_otherwise_in_every_epoch():
    def epochs():
        batches = data.loader(torch.arange(10), 4, shuffle=True)
        return [torch.cat(list(batches)).tolist() for _ in range(2)]

    first, second = epochs()
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert epochs() == [first, second]
