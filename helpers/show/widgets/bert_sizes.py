"""How large the course's BERT is, tensor by tensor, and how nn.DataParallel sends its parameters and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

BUFFER = 10 * 2**20  # bytes that nn.DataParallel sends at once


@dataclass(frozen=True)
class Sizes:
    """`helpers.models.Bert` in numbers."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    length: int

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Name -> bytes (float32) of every parameter, in the order of `model.parameters()`; .w: weight, .b: bias."""
        h = self.hidden
        found = {"token": self.vocabulary * h, "place": self.length * h}
        linears = {"qkv": (h, 3 * h), "project": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}
        for layer in range(self.layers):
            found |= {f"{layer}.{norm}.{part}": h for norm in ("norm1", "norm2") for part in "wb"}
            for name, (inputs, outputs) in linears.items():
                found |= {f"{layer}.{name}.w": inputs * outputs, f"{layer}.{name}.b": outputs}
        found |= {"norm.w": h, "norm.b": h, "head.w": self.vocabulary * h, "head.b": self.vocabulary}
        return {name: 4 * count for name, count in found.items()}

    @cached_property
    def sent(self) -> list[list[str]]:
        """Which parameters make up each flat buffer that is sent to a replica: the one that fills it closes it."""
        chunks: list[list[str]] = []
        size = BUFFER
        for name, nbytes in self.parameters.items():
            if size >= BUFFER:
                chunks.append([])
                size = 0
            chunks[-1].append(name)
            size += nbytes
        return chunks

    @cached_property
    def added_up(self) -> list[list[str]]:
        """Which gradients make up each flat buffer that is added up on the first GPU: closed before it overflows."""
        chunks: list[list[str]] = [[]]
        size = 0
        for name, nbytes in self.parameters.items():
            if chunks[-1] and size + nbytes > BUFFER:
                chunks.append([])
                size = 0
            chunks[-1].append(name)
            size += nbytes
        return chunks
