"""Small data for programs from elsewhere: random images and plain text, in the formats that the programs read."""

from __future__ import annotations

import itertools
import pickle
import struct
from pathlib import Path

import numpy as np

SENTENCES = (
    "a tensor lives on one device and an operator wants all of its tensors there",
    "every rank computes the gradients of its own part of the batch",
    "the ranks add their gradients and take the same step",
    "a stream runs its kernels one after the other",
    "memory that a tensor leaves goes back to the cache",
)


def text(folder: Path, name: str, lines: int, last: str = "") -> None:
    """Write `lines` lines of plain text and then `last` to the file `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = itertools.islice(itertools.cycle(SENTENCES), lines)
    (folder / name).write_text("".join(f"{line} {number % 7}\n" for number, line in enumerate(chosen)) + last)


def images(folder: Path, size: int, each: int, classes: int = 2, suffix: str = "png", one_colour: bool = False) -> None:
    """Write random images, size x size x RGB, `each` in every folder 0, 1 and so on: what ImageFolder reads.

    An image of one colour stays the same whatever part a program cuts out at random.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    for label, number in itertools.product(range(classes), range(each)):
        path = folder / f"class_{label}" / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (1, 1, 3) if one_colour else (size, size, 3), dtype=np.uint8)
        Image.fromarray(np.broadcast_to(pixels, (size, size, 3)).copy()).save(path)


def mnist(folder: Path, training: int = 512, test: int = 128) -> None:
    """Write MNIST/raw as torchvision reads it. Each digit is a bright bar at its own place."""
    rng = np.random.default_rng(0)
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", training), ("t10k", test)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        pixels = rng.integers(0, 64, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[4:24, 2 * label + 4 : 2 * label + 7] = 255
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())


def cifar10(folder: Path, each: int = 64) -> None:
    """Write cifar-10-batches-py with `each` random images in each of its six files."""
    rng = np.random.default_rng(0)
    batches = folder / "cifar-10-batches-py"
    batches.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        batch = {
            "data": rng.integers(0, 256, (each, 3072), dtype=np.uint8),
            "labels": rng.integers(0, 10, each).tolist(),
        }
        (batches / name).write_bytes(pickle.dumps(batch))
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(label) for label in range(10)]}))


def corpus(folder: Path, lines: int = 600) -> None:
    """A data set of plain text, as `datasets.load_dataset(folder)` reads it."""
    text(folder, "train.txt", lines)
    text(folder, "validation.txt", lines // 8)


def pairs(folder: Path, each: int = 32) -> None:
    """A data set in the form of GLUE's MRPC: two sentences, and whether they mean the same."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 2 * each), ("validation", each), ("test", each)):
        rows = [
            {
                "sentence1": SENTENCES[number % 5],
                "sentence2": SENTENCES[number % 5 if number % 2 else (number + 1) % 5],
                "label": number % 2,
                "idx": number,
            }
            for number in range(count)
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n"
        + "".join(f"  - split: {part}\n    path: {part}.jsonl\n" for part in ("train", "validation", "test"))
        + "dataset_info:\n  config_name: mrpc\n  features:\n  - name: sentence1\n    dtype: string\n"
        "  - name: sentence2\n    dtype: string\n  - name: label\n    dtype:\n      class_label:\n        names:\n"
        "          '0': not_equivalent\n          '1': equivalent\n  - name: idx\n    dtype: int32\n---\n"
    )


def model(folder: Path, kind: str) -> None:
    """A model of transformers with random weights and without dropout, and a tokenizer of whole words beside it."""
    import tokenizers
    import torch
    import transformers

    words = sorted({word for line in SENTENCES for word in line.split()} | set("0123456"))
    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if kind == "bert":
        ends = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends
        )
    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "eos_token": "[SEP]",
        "bos_token": "[CLS]",
        "cls_token": "[CLS]",
    }
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, sep_token="[SEP]", mask_token="[MASK]", model_max_length=128
    )
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    sizes |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            **{"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **{"bos_token_id": 2, "eos_token_id": 3},
        )
        made = transformers.GPT2LMHeadModel(config)
    elif kind == "llama":
        config = transformers.LlamaConfig(
            **sizes, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2
        )
        made = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.BertConfig(
            **sizes,
            **{"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        )
        made = transformers.BertForSequenceClassification(config)
    made.save_pretrained(folder)
    fast.save_pretrained(folder)


def metric(folder: Path) -> None:
    """A metric of `evaluate` that stands in for GLUE's: the share of right answers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{folder.name}.py").write_text(
        "import datasets\nimport evaluate\n\n\nclass Accuracy(evaluate.Metric):\n"
        "    def _info(self):\n"
        "        number = datasets.Value('int64')\n"
        "        features = datasets.Features({'predictions': number, 'references': number})\n"
        "        return evaluate.MetricInfo(description='', citation='', inputs_description='', features=features)\n\n"
        "    def _compute(self, predictions, references):\n"
        "        right = sum(int(a == b) for a, b in zip(predictions, references))\n"
        "        return {'accuracy': right / len(references), 'f1': right / len(references)}\n"
    )


def flat_images(folder: Path, size: int, count: int) -> None:
    """Random JPEG images without classes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / f"{number}.jpg")


def corpus_of_json(folder: Path, lines: int = 600) -> None:
    """A data set of texts, one JSON object a line."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    chosen = itertools.islice(itertools.cycle(SENTENCES), lines)
    (folder / "data.json").write_text(
        "".join(json.dumps({"text": f"{line} {n % 7}"}) + "\n" for n, line in enumerate(chosen))
    )
