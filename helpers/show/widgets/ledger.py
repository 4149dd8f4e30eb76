"""What one GPU holds during a training step, by name and by kind, and when it held the most."""

from __future__ import annotations

from helpers.show.widgets.cards import block

KINDS = ("parameters", "optimizer state", "gradients", "activations", "logits", "other")


class Ledger:
    """What one GPU holds, by name and by kind (`KINDS`), in bytes; `peak`, `at_peak` and `moment` are of the most."""

    def __init__(self):
        self._blocks: dict[str, tuple[str, int]] = {}
        self._kinds = dict.fromkeys(KINDS, 0)
        self._now = 0
        self.peak, self.at_peak, self.moment = 0, dict(self._kinds), ""
        self.doing = ""  # the moment that the next tensors belong to

    def take(self, kind: str, **sizes: int) -> None:
        """Hold new tensors."""
        for name, size in sizes.items():
            size = block(size)
            self._blocks[name] = kind, size
            self._kinds[kind] += size
            self._now += size
        if self._now > self.peak:
            self._note(0)

    def give(self, *names: str) -> None:
        """Let tensors go."""
        for name in names:
            kind, size = self._blocks.pop(name)
            self._kinds[kind] -= size
            self._now -= size

    def give_all(self, kind: str) -> None:
        """Let all tensors of a kind go."""
        self.give(*[name for name, (its, _) in self._blocks.items() if its == kind])

    def pass_through(self, *sizes: int) -> None:
        """Take memory and give it back soon, as workspaces are."""
        size = sum(map(block, sizes))
        if self._now + size > self.peak:
            self._note(size)

    def holds(self, name: str) -> bool:
        """Whether a tensor of that name is held."""
        return name in self._blocks

    def _note(self, passing: int) -> None:
        self.peak, self.moment = self._now + passing, self.doing
        self.at_peak = {**self._kinds, "other": self._kinds["other"] + passing}
