"""One GPU's memory, tensor by tensor, as the course's BERT (`helpers.models.Bert`) goes forward and backward on it.

A `Walk` does in a `Ledger` what PyTorch does in the GPU's memory, in PyTorch's order. Sizes in bytes, for n tokens on
the GPU (samples x length T), hidden size h, a heads:

    A = 4 n h      one float per token and hidden unit
    S = 4 n a T    the attention scores; (A and S are float32, the masks of dropout one byte per element)

What a layer keeps for its backward pass is 17.5 A + 2.25 S and four small rows of 4 n: its input, both norms' outputs,
query, key, value, the mixed values, the sum in the middle (8 A), the wide layer before GELU and after its dropout
(8 A), masks of dropout (1.5 A); the softmax, its dropped copy and their mask (2.25 S). No attention kernel is involved:
`Bert(fused=False)` multiplies the scores out itself, in float32, and so keeps them. With `fused=True` CUDA's
memory-efficient kernel (float32, dropout) would keep 4 n a instead of 2.25 S; that is not computed here.
"""

from __future__ import annotations

from helpers.measure import MiB
from helpers.show.widgets.bert_sizes import Sizes
from helpers.show.widgets.cards import Card, rounded
from helpers.show.widgets.ledger import Ledger

_FEW = 3072  # tokens for which CUDA adds up an embedding's gradient without temporaries


class Walk:
    """One replica's forward and backward pass in `ledger`; the loss in between is `helpers.show.widgets.bert_memory`'s.

    `n`: samples on this GPU. `copied`: the parameters are nn.DataParallel's copies, in flat buffers (`Sizes.sent`) that
    live until the last tensor in them is needed no more.
    """

    def __init__(self, ledger: Ledger, sizes: Sizes, card: Card, n: int, copied: bool):
        self.ledger, self.sizes, self.card = ledger, sizes, card
        self.tokens = n * sizes.length
        self.A = 4 * self.tokens * sizes.hidden
        self.S = 4 * self.tokens * sizes.heads * sizes.length
        self.rows = 2 * rounded(4 * self.tokens)  # mean and deviation of each row, for a norm's backward
        self.logits = 4 * self.tokens * sizes.vocabulary
        self._needed = {f"copy {i}": set(names) for i, names in enumerate(sizes.sent)} if copied else {}
        for buffer, names in self._needed.items():
            ledger.take("parameters", **{buffer: sum(sizes.parameters[name] for name in names)})
            # Embeddings and biases are not needed for the backward pass.
            names -= {
                name for name in names if name in ("token", "place") or name.endswith(".b") and "norm" not in name
            }

    # ---- forward

    def forward(self) -> None:
        """Up to the logits."""
        ledger, A, sizes = self.ledger, self.A, self.sizes
        ledger.doing = "the forward pass"
        ledger.take("other", places=8 * sizes.length)
        ledger.take("other", words=A, place=4 * sizes.length * sizes.hidden, sum=A)
        ledger.give("words", "place")
        ledger.take("activations", **{"mask": A // 4, "0.x": A})
        ledger.give("sum")
        for layer in range(sizes.layers):
            self._attend(layer)
            self._feed_forward(layer)
        ledger.take("activations", normed=A, rows=self.rows)
        ledger.take("logits", logits=self.logits)
        self._product(bias=True)

    def _attend(self, i: int) -> None:
        ledger, A, S = self.ledger, self.A, self.S
        self._keep(i, normed1=A, rows1=self.rows)
        ledger.take("other", qkv=3 * A)
        self._product(bias=True)
        self._keep(i, query=A, key=A)
        ledger.take("other", raw=S)
        self._product()
        ledger.take("other", scaled=S)
        ledger.give("raw")
        self._keep(i, softmax=S, softmax_mask=S // 4, dropped=S, value=A)
        ledger.take("other", mixed=A)
        self._product()
        self._keep(i, heads=A)
        ledger.give("qkv", "mixed", "scaled")
        self._add(i, mask="mask1", to="middle")

    def _feed_forward(self, i: int) -> None:
        ledger, A = self.ledger, self.A
        self._keep(i, normed2=A, rows2=self.rows, up=4 * A)
        self._product(bias=True)
        ledger.take("other", gelu=4 * A)
        self._keep(i, wide_mask=A, wide=4 * A)
        ledger.give("gelu")
        self._add(i, mask="mask2", to=None)

    def _add(self, i: int, mask: str, to: str | None) -> None:
        """Linear layer, dropout, and the sum with what came in: the next block's input."""
        ledger, A = self.ledger, self.A
        ledger.take("other", linear=A)
        self._product(bias=True)
        self._keep(i, **{mask: A // 4})
        ledger.take("other", out=A)
        ledger.give("linear")
        ledger.take("activations", **{f"{i}.{to}" if to else f"{i + 1}.x": A})
        ledger.give("out")

    # ---- backward

    def backward(self) -> None:
        """From the gradient of the logits, which is held as "logits'", to that of the embedding."""
        ledger, A, sizes = self.ledger, self.A, self.sizes
        ledger.doing = "the head's backward pass"
        self._linear("head", sizes.vocabulary, into="normed'", size=A)
        ledger.give("logits'", "normed")
        ledger.take("other", **{"x'": A})
        self._norm("norm")
        ledger.give("normed'", "rows", f"{sizes.layers}.x")
        ledger.doing = "the layers' backward pass"
        for layer in reversed(range(sizes.layers)):
            self._feed_forward_backward(layer)
            self._attend_backward(layer)
        self._embed_backward()

    def _feed_forward_backward(self, i: int) -> None:
        ledger, A, h = self.ledger, self.A, self.sizes.hidden
        ledger.take("other", **{"down'": A})
        self._let_go(i, "mask2")
        self._linear(f"{i}.down", h, into="wide'", size=4 * A)
        ledger.give("down'")
        self._let_go(i, "wide")
        ledger.take("other", **{"gelu'": 4 * A})
        ledger.give("wide'")
        self._let_go(i, "wide_mask")
        ledger.take("other", **{"up'": 4 * A})
        ledger.give("gelu'")
        self._let_go(i, "up")
        self._linear(f"{i}.up", 4 * h, into="normed2'", size=A)
        ledger.give("up'")
        self._let_go(i, "normed2")
        self._join(i, "norm2", "normed2'", "middle", "rows2")

    def _attend_backward(self, i: int) -> None:
        ledger, A, S, h = self.ledger, self.A, self.S, self.sizes.hidden
        ledger.take("other", **{"project'": A})
        self._let_go(i, "mask1")
        self._linear(f"{i}.project", h, into="heads'", size=A)
        ledger.give("project'")
        self._let_go(i, "heads")
        ledger.take("other", **{"mixed'": A})
        ledger.give("heads'")
        self._results("mixed'", (i, "value", "dropped"), **{"value'": A, "dropped'": S})
        self._elementwise("dropped'", "softmax'", (i, "softmax_mask"))
        self._elementwise("softmax'", "scaled'", (i, "softmax"))
        self._elementwise("scaled'", "raw'", (i,))
        self._results("raw'", (i, "query", "key"), **{"query'": A, "key'": A})
        ledger.take("other", **{"stacked'": 3 * A})
        ledger.give("query'", "key'", "value'")
        ledger.take("other", **{"qkv'": 3 * A})
        ledger.give("stacked'")
        self._linear(f"{i}.qkv", 3 * h, into="normed1'", size=A)
        ledger.give("qkv'")
        self._let_go(i, "normed1")
        self._join(i, "norm1", "normed1'", "x", "rows1")

    def _embed_backward(self) -> None:
        """The gradient of the place's embedding, then the words': tokens are sorted, rows added up in two passes."""
        ledger, sizes, tokens = self.ledger, self.sizes, self.tokens
        ledger.give("mask", "places")
        self.ledger.take("gradients", **{"place'": sizes.parameters["place"]})
        index, parts = 8 * tokens, min(tokens, sizes.vocabulary)
        pieces = tokens // 10 + parts
        many = tokens > _FEW
        ledger.take("other", **({"sorted": index, "places": index} if many else {}))
        ledger.pass_through(*(index, 2 * index) if many else ())
        ledger.take("gradients", **{"token'": sizes.parameters["token"]})
        rows = 4 * sizes.hidden * pieces
        ledger.pass_through(*(index, 8 * parts, 8 * parts, 8 * pieces, rows) if many else ())
        ledger.give(*("sorted", "places") if many else ())
        ledger.give("x'")

    # ---- what occurs again and again

    def _keep(self, i: int, **sizes: int) -> None:
        self.ledger.take("activations", **{f"{i}.{name}": size for name, size in sizes.items()})

    def _let_go(self, i: int, *names: str) -> None:
        self.ledger.give(*(f"{i}.{name}" for name in names))

    def _product(self, bias: bool = False) -> None:
        """A product of matrices takes a workspace; one with a bias goes through cublasLt, whose workspace is 1 MiB."""
        if not self.card.keeps_workspaces:
            self.ledger.pass_through(MiB if bias else self.card.workspace)

    def _linear(self, name: str, columns: int, into: str, size: int) -> None:
        """Gradients of a linear layer: of its input, its weight and its bias."""
        self.ledger.take("other", **{into: size})
        self._product()
        self._gradients(f"{name}.w")
        self._product()
        self._release(f"{name}.w")
        self._gradients(f"{name}.b")
        self.ledger.pass_through(self.card.partial_sums(self.tokens, columns))

    def _results(self, of: str, gives: tuple, **sizes: int) -> None:
        """Both gradients of a product of matrices."""
        for name, size in sizes.items():
            self.ledger.take("other", **{name: size})
            self._product()
        self.ledger.give(of)
        self._let_go(*gives)

    def _elementwise(self, of: str, into: str, gives: tuple) -> None:
        self.ledger.take("other", **{into: self.S})
        self.ledger.give(of)
        self._let_go(*gives)

    def _join(self, i: int, norm: str, of: str, before: str, rows: str) -> None:
        """A norm's backward; its result is added onto the gradient that went past it, "x'"."""
        self.ledger.take("other", **{"norm'": self.A})
        self._norm(f"{i}.{norm}")
        self.ledger.give(of, "norm'")
        self._let_go(i, before, rows)

    def _norm(self, name: str) -> None:
        self._gradients(f"{name}.w", f"{name}.b")
        self.ledger.pass_through(self.card.norm_sums(self.tokens, self.sizes.hidden))
        self._release(f"{name}.w", f"{name}.b")

    def _gradients(self, *names: str) -> None:
        self.ledger.take("gradients", **{f"{name}'": self.sizes.parameters[name] for name in names})

    def _release(self, *names: str) -> None:
        """Parameters that are needed no more: a flat copy goes with the last of those in it."""
        for needed in self._needed.values():
            needed.difference_update(names)
        self.drop_unneeded_copies()

    def drop_unneeded_copies(self) -> None:
        """The replicas are gone after the forward pass; what backward needs lives on."""
        for buffer in [buffer for buffer, needed in self._needed.items() if not needed]:
            self.ledger.give(buffer)
            del self._needed[buffer]
