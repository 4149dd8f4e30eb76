"""The jobs of `published.json`, built from their sizes. `seconds_of(row)` is the modelled time of a step.

A row names one of `JOBS` and gives its settings. Each job is built as one rank of its GPUs and gives a function
`step(parts)`: one step of the optimizer on `parts` micro-batches. Steps of many micro-batches are timed with one and
with two, and each further one is taken to cost the difference. GPT-3's dropout, and the loss of the next word on the
same words, stand for what the sources do with real texts.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torchvision.models.resnet import Bottleneck, ResNet
from virtual_gpus import record_timeline, virtual_gpus
from virtual_gpus.dispatch.measured_calls import key_of
from virtual_gpus.gpus import spec

from benchmarks.reference.networks import GPT, positions
from benchmarks.scale import Llama, Shape

Step = Callable[[int], None]


def selective() -> Any:
    """The contexts of one block: attention is kept, and of matrix multiplications every second one (torchtitan)."""
    products = {False: 0, True: 0}  # seen in the forward pass, and when it is repeated

    def policy(context, function, *args, **kwargs):
        if function is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            keeps = products[context.is_recompute] % 2 == 1
        else:
            keeps = "attention" in str(function) or "reduce_scatter" in str(function)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpointed(blocks: Any, which: str | None) -> None:
    """Wrap blocks in place. which: "all", "second" (every second block), "operators" (`selective`), or None."""
    for number, block in enumerate(blocks):
        if which == "operators":
            blocks[number] = checkpoint_wrapper(block, context_fn=selective)
        elif which == "all" or (which == "second" and number % 2):
            blocks[number] = checkpoint_wrapper(block)


def sharded(model: nn.Module, blocks: Any, mesh: DeviceMesh, pure: bool = False, keeps: bool = False) -> None:
    """FSDP of a model on the meta device, onto this rank's GPU. pure: gradients too are summed in bfloat16. keeps: the
    parameters stay gathered until the backward pass."""
    reduced = torch.bfloat16 if pure else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False if keeps else None)
    model.to_empty(device="cuda")


def trained(model: nn.Module, loss: Callable[[], Tensor], clips: bool = True) -> Step:
    """A step of AdamW in one kernel."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(parts: int) -> None:
        for part in range(parts):
            together = isinstance(model, DistributedDataParallel) and part < parts - 1
            with model.no_sync() if together else contextlib.nullcontext():
                loss().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def next_words(model: nn.Module, words: Tensor, chunks: int = 1) -> Tensor:
    """The loss of a language model on `words`, whose next words are their own, computed in so many parts."""
    scores, wanted = model(words).flatten(0, 1), words.flatten()
    if chunks == 1:
        return F.cross_entropy(scores.float(), wanted)
    pairs = zip(scores.chunk(chunks), wanted.chunk(chunks), strict=True)
    return torch.stack([F.cross_entropy(part.float(), own) for part, own in pairs]).sum()


# ---- language models -------------------------------------------------------------------------------------------------

# Layers, width, heads (scripts/train/yamls/pretrain in LLM Foundry)
MPT = {
    "125M": (12, 768, 12),
    "760M": (24, 1536, 12),
    "1B": (24, 2048, 16),
    "3B": (32, 2560, 20),
    "7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (48, 7168, 56),
    "70B": (80, 8192, 64),
}
# Shares of the peak that FlashAttention's kernel in Triton reaches, forward and backward. A100: the FlashAttention-2
# paper (arXiv 2307.08691, section 4.1) has 0.73 and 0.63 for its own kernels, which are 1.3 to 1.5 times and twice as
# fast as those in Triton. H100: half of these shares, fitted to MPT 1B with 16,384 tokens, a row to fit to.
TRITON = {"A100": (0.52, 0.315), "A100-80GB": (0.52, 0.315), "H100": (0.26, 0.158)}
# As Meta published them: Llama 2 ("-2", 34B: Code Llama), 3, 3.1, 3.2
LLAMAS = {
    "7B-2": Shape(32, 4096, 32, 32, 11008, 32_000),
    "34B-2": Shape(48, 8192, 64, 8, 22016, 32_000),
    "70B-2": Shape(80, 8192, 64, 8, 28672, 32_000),
    "3B-3.2": Shape(28, 3072, 24, 8, 8192),
    "8B": Shape(32, 4096, 32, 8, 14336),
    "70B": Shape(80, 8192, 64, 8, 28672),
    "405B": Shape(126, 16384, 128, 8, 53248),
}


def mpt(
    gpus: int, layers: int, size: str, length: int, batch: int, checkpoint=None, pure=False, keeps_parameters=False
) -> Step:
    """MPT, a GPT with its head tied to its words, sharded over all GPUs. `in_triton` times its attention."""
    _, width, heads = MPT[size]
    with torch.device("meta"):
        model = GPT(words=50_368, hidden=width, layers=layers, heads=heads, length=length)
        model.head.weight = model.words.weight
        if pure:
            model.bfloat16()
    checkpointed(model.blocks, checkpoint)
    sharded(model, model.blocks, init_device_mesh("cuda", (gpus,)), pure, keeps_parameters)
    words = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    return trained(model, partial(next_words, model, words))


def in_triton(gpu: str, size: str, length: int, batch: int, **_: Any) -> dict[str, Any]:
    """The attention of MPT as measured operators: FlashAttention's kernel in Triton of 2022."""
    _, width, heads = MPT[size]
    whole = torch.empty(batch, length, 3 * width, dtype=torch.bfloat16, device="meta")
    parts = [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in whole.split(width, dim=2)]
    seconds = 2 * batch * length**2 * width / spec(gpu).flops.bf16  # two products, of which the causal mask leaves half
    rows = []
    kernels = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "cudnn")]  # what PyTorch would choose
    for suffix, products, share in zip(("", "_backward"), (1, 2.5), TRITON[gpu], strict=True):
        for kernel in kernels:
            asked = json.loads(key_of(kernel + suffix, parts, {"is_causal": True, "dropout_p": 0.0}))
            rows.append({"operator": asked[0], "arguments": asked[1], "seconds": products * seconds / share})
    return {"gpu": gpu, "rows": rows}


def in_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism as torchtitan has it, without its parallel loss."""
    parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "scores": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    plan = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "w2": RowwiseParallel(output_layouts=Shard(1)),
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        **{name: ColwiseParallel(input_layouts=Shard(1)) for name in ("w1", "w3")},
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def llama(
    gpus: int,
    layers: int,
    size: str,
    length: int,
    batch: int,
    checkpoint=None,
    pure=False,
    tensor=1,
    hybrid=False,
    chunks=1,
    compiled=False,
) -> Step:
    """A Llama. pure: all in bfloat16, and on one GPU. tensor: GPUs of a host that share each layer. hybrid: sharded on
    each host, with a copy on every one. chunks: the loss is computed in so many parts of the text, one after the other.
    """
    with torch.device("meta"):
        model = Llama(replace(LLAMAS[size], layers=layers))
    if tensor > 1:
        mesh = init_device_mesh("cuda", (gpus // tensor, tensor), mesh_dim_names=("data", "model"))
        in_parallel(model, mesh["model"])
        mesh = mesh["data"]
    elif hybrid:
        mesh = init_device_mesh("cuda", (gpus // 8, 8), mesh_dim_names=("replicas", "shards"))
    elif not pure:
        mesh = init_device_mesh("cuda", (gpus,))
    checkpointed(model.blocks, checkpoint)
    if pure:
        model.bfloat16().to_empty(device="cuda")
    else:
        sharded(model, model.blocks, mesh)
    words = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    loss = partial(next_words, model, words, chunks)
    return trained(model, torch.compile(loss) if compiled else loss, clips=not pure)


def gpt(gpus: int, layers: int, width: int, heads: int, words: int, length: int, batch: int) -> Step:
    """A GPT in bfloat16 autocast with DistributedDataParallel."""
    dist.init_process_group("nccl")
    net = GPT(words=words, hidden=width, layers=layers, heads=heads, length=length, dropout=0.1).cuda()
    net.head.weight = net.words.weight
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return next_words(model, tokens)

    return trained(model, loss)


# ---- encoders --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer of BERT, or of OPT if it is causal: each norm behind its residual connection."""

    def __init__(self, width: int, heads: int, hidden: int, causal: bool, fused: bool):
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = F.relu if causal else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key, value = parts
        if self.fused:
            mixed = F.scaled_dot_product_attention(
                query, key, value, dropout_p=0.0 if self.causal else 0.1, is_causal=self.causal
            )
        else:
            scores = query @ key.transpose(-1, -2) / query.size(-1) ** 0.5
            scores = scores + torch.zeros(x.size(0), 1, x.size(1), x.size(1), dtype=scores.dtype, device=x.device)
            if self.causal:  # OPT's softmax is in float32
                weights = F.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
            else:
                weights = F.dropout(F.softmax(scores, -1), 0.1)
            mixed = weights @ value
        x = self.norm1(x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1))
        return self.norm2(x + F.dropout(self.narrow(self.act(self.widen(x))), 0.1))


class Encoder(nn.Module):
    """BERT, ELECTRA or OPT 350M with a head that predicts words. embedded: the width of words, if it is another."""

    def __init__(self, layers, width, heads, hidden, words, embedded=None, causal=False, fused=True):
        super().__init__()
        embedded = embedded or width
        self.causal, self.words = causal, nn.Embedding(words, embedded)
        self.places = nn.Embedding(2050 if causal else 512, width if causal else embedded)
        self.kinds = None if causal else nn.Embedding(2, embedded)
        self.norm = nn.Identity() if causal else nn.LayerNorm(embedded)
        self.widen = nn.Linear(embedded, width, bias=not causal) if embedded != width else nn.Identity()
        self.layers = nn.Sequential(*(Layer(width, heads, hidden, causal, fused) for _ in range(layers)))
        self.narrow = nn.Linear(width, embedded, bias=not causal) if embedded != width or not causal else nn.Identity()
        self.narrow_norm = nn.Identity() if causal else nn.LayerNorm(embedded)
        self.head = nn.Linear(embedded, words, bias=not causal)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, predicted: Tensor | None = None) -> Tensor:
        """(batch, length) -> scores of words everywhere, or at the places `predicted`, counted through all texts."""
        if self.causal:
            x = self.widen(self.words(tokens)) + self.places(positions(tokens))
        else:
            x = self.words(tokens) + self.kinds(torch.zeros_like(tokens)) + self.places(positions(tokens))
            x = self.widen(F.dropout(self.norm(x), 0.1))
        x = self.layers(x)
        if predicted is not None:
            x = x.flatten(0, 1).index_select(0, predicted)
        x = self.narrow(x)
        return self.head(self.narrow_norm(x if self.causal else F.gelu(x)))


NETS = {
    "BERT base": {"width": 768, "heads": 12, "hidden": 3072, "words": 30_522},
    "ELECTRA base discriminator": {"width": 768, "heads": 12, "hidden": 3072, "words": 30_522},
    "ELECTRA base generator": {
        "width": 256, "heads": 4, "hidden": 1024, "words": 30_522, "embedded": 768,
    },
    "OPT 350M": {
        "width": 1024, "heads": 16, "hidden": 4096, "words": 50_272, "embedded": 512, "causal": True,
    },
}  # fmt: skip


def hf(gpus: int, layers: int, net: str, batch: int, length: int, attention: str) -> Step:
    """Forward and backward in fp16, with the sum of the scores as the loss."""
    model = Encoder(layers, **NETS[net], fused=attention == "fused").cuda().half()
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")

    def step(parts: int) -> None:
        model.zero_grad()
        model(tokens).sum().backward()

    return step


def bert(gpus: int, layers: int, length: int, batch: int, precision: str, predictions: int) -> Step:
    """Pre-training of BERT large: words at some places of each text are predicted."""
    net = Encoder(layers, 1024, 16, 4096, 30_528, fused=False).cuda()
    model = replicated(net.half() if precision == "fp16" else net, gpus)
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
    places = torch.zeros(batch * predictions, dtype=torch.long, device="cuda")

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens, places).float(), places)

    return trained(model, loss, clips=False)


def replicated(net: nn.Module, gpus: int) -> nn.Module:
    """With DistributedDataParallel, if there are several GPUs."""
    if gpus == 1:
        return net
    dist.init_process_group("nccl")
    return DistributedDataParallel(net)


# ---- images ----------------------------------------------------------------------------------------------------------


def images(
    gpus: int,
    layers: int,
    net: str,
    batch: int,
    px: int,
    precision: str,
    optimizer: str | None,
    channels_last: bool = False,
) -> Step:
    """A network of torchvision. Without an optimizer, only the forward and the backward pass."""
    if net == "resnext101_32x4d":
        made: nn.Module = ResNet(Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
    else:
        made = torchvision.models.get_model(net)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = replicated(made.cuda().to(memory_format=layout), gpus)
    x = torch.zeros(batch, 3, px, px, device="cuda").to(memory_format=layout)
    y = torch.zeros(batch, dtype=torch.long, device="cuda")
    if optimizer == "rmsprop":
        stepping: Any = torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    else:
        stepping = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5, foreach=False)

    def step(parts: int) -> None:
        for part in range(parts):
            together = gpus > 1 and part < parts - 1
            with model.no_sync() if together else contextlib.nullcontext():  # type: ignore[operator]
                with torch.autocast("cuda", torch.float16, enabled=precision == "fp16"):
                    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
                loss.backward()
        if optimizer is not None:
            stepping.step()
        stepping.zero_grad()

    return step


JOBS: dict[str, Callable[..., Step]] = {
    job.__name__: job
    for job in (mpt, llama, gpt, bert, hf, images)  # type: ignore[attr-defined]
}


def layers_of(row: dict[str, Any]) -> int:
    """The layers of a job's Transformer, which are all alike. 0 for other networks."""
    settings = row["settings"]
    if row["job"] in ("mpt", "llama"):
        return MPT[settings["size"]][0] if row["job"] == "mpt" else LLAMAS[settings["size"]].layers
    return {"gpt": settings.get("layers", 0), "bert": 24, "hf": 24 if settings.get("net") == "OPT 350M" else 12}.get(
        row["job"], 0
    )


def seconds_of(row: dict[str, Any]) -> tuple[float, float]:
    """Modelled seconds of a step, and the part of it in which the GPU runs kernels, 0 to 1.

    Transformers of many layers run with 4 and with 8, and each further layer is taken to cost what these four do. No
    step is faster than its input: `fed` are the images per second that reach a GPU.
    """
    layers = layers_of(row)
    if layers <= 12:
        return _seconds(_frozen(row), layers)
    (few, _), (more, busy) = (_seconds(_frozen(row), count) for count in (4, 8))
    return more + (layers - 8) * (more - few) / 4, busy


def _frozen(row: dict[str, Any]) -> str:
    settings = row["settings"] | ({"compiled": True} if row["how"] == "compiled" else {})
    return json.dumps([row["job"], row["gpu"], row["gpus"], row.get("network", ["Ethernet 100", 1]), settings])


@lru_cache
def _seconds(frozen: str, layers: int) -> tuple[float, float]:
    name, gpu, gpus, (network, adapters), settings = json.loads(frozen)
    parts, fed, _ = settings.pop("parts", 1), settings.pop("fed", None), settings.pop("layers", None)
    precision = settings.get("precision")
    rank = {} if gpus == 1 else {"rank": 0, "world_size": gpus}
    hardware: dict[str, Any] = {"kind": gpu, "memory": "1 TiB", "network": network, "adapters": adapters}
    with contextlib.ExitStack() as stack:
        if name == "mpt":
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
            json.dump(in_triton(gpu, **settings), file)
            file.flush()
            hardware["measured"] = file.name
        hardware["compile"] = "modelled"  # for the jobs that call torch.compile
        stack.enter_context(virtual_gpus(min(8, gpus), shapes_only=True, **hardware, **rank))
        stack.enter_context(tf32(precision == "tf32", precision))
        try:
            step = JOBS[name](gpus, layers, **settings)
            step(1)  # makes the optimizer's state
            one, busy = timed(step, 1)
            if parts == 1:
                return max(one, settings["batch"] / fed if fed else 0.0), busy
            two, busy = timed(step, 2)
            return one + (parts - 1) * (two - one), busy
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextlib.contextmanager
def tf32(products: bool, precision: str | None) -> Iterator[None]:
    """TF32 in matrix multiplications, and in convolutions unless the precision is fp32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, precision != "fp32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def timed(step: Step, parts: int) -> tuple[float, float]:
    """Seconds of a step, and the part in which the GPU runs kernels."""
    torch.cuda.synchronize()
    with record_timeline() as timeline:
        step(parts)
        torch.cuda.synchronize()
    return timeline.seconds, timeline.utilisation(0)
