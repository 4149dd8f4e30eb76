"""helpers/data.py: bundled images, and random words."""

import re
import shutil

import pytest
import torch
from torchvision import datasets

from helpers import data


def test_every_checksum_is_right_and_in_the_readme():
    sums = [line.split() for line in (data.DATA / "SHA256SUMS").read_text().splitlines()]
    readme = re.findall(r"\| `(\S+)` \| `([0-9a-f]{64})` \|", (data.DATA / "README.md").read_text(encoding="utf-8"))
    assert readme == [(file, checksum) for checksum, file in sums] and len(sums) == 5
    assert sum(data._bundled(file).stat().st_size for _, file in sums) < 5e6


def test_a_changed_byte_a_missing_file_and_a_missing_folder_are_noticed(tmp_path, monkeypatch):
    copy = tmp_path / "data"
    shutil.copytree(data.DATA, copy)
    monkeypatch.setattr(data, "DATA", copy)
    path = copy / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(data.DamagedData, match="The checksum of .*train-images-idx3-ubyte is wrong.*git checkout data"):
        data.fashion_mnist()
    (copy / "pride_and_prejudice.txt").unlink()
    with pytest.raises(data.DamagedData, match="pride_and_prejudice.txt.* missing.*git checkout data"):
        data._bundled("pride_and_prejudice.txt")
    monkeypatch.setattr(data, "DATA", tmp_path / "site-packages" / "data")
    with pytest.raises(data.DamagedData, match="There is no folder .*pip install -e ."):
        data.fashion_mnist()


def test_fashion_mnist_is_balanced_and_normalised_and_holds_the_pixels_that_torchvision_reads():
    images, labels = data.fashion_mnist(channels=1, size=28).tensors
    assert images.shape == (4000, 1, 28, 28) and images.dtype == torch.float32
    assert labels.dtype == torch.int64 and labels.bincount().tolist() == [400] * 10
    assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02
    raw = datasets.FashionMNIST(data.DATA)
    assert torch.equal((images[:, 0] * 0.354 + 0.289).mul(255).round().byte(), raw.data)
    assert torch.equal(labels, raw.targets)


def test_fashion_mnist_for_colour_networks():
    dataset = data.fashion_mnist(count=100)
    image, label = dataset[0]
    assert len(dataset) == 100 and image.shape == (3, 32, 32) and torch.equal(image[0], image[2])
    assert dataset.classes[label] in datasets.FashionMNIST.classes
    assert dataset.tensors[1].bincount(minlength=10).min() > 0  # the first images mix the classes


def test_what_there_is_not_is_refused():
    for wrong in ({"channels": 2}, {"size": 0}, {"count": 0}, {"count": 4001}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            data.fashion_mnist(**wrong)


def test_random_tokens():
    inputs, targets = data.random_tokens(6, length=5, vocabulary_size=30)
    assert inputs.shape == targets.shape == (6, 5) and inputs.dtype == targets.dtype == torch.int64
    assert 0 <= inputs.min() and inputs.max() < 30 and not torch.equal(inputs, targets)
