"""Trains a decoder of about 1.7 billion parameters with fully_shard for two steps: the program of docs/planning.md."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    """Causal attention and a feed-forward network on (batch, length, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        parts = self.inputs(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.output(attended)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, and the logits of the next tokens."""

    def __init__(self, words: int, width: int, layers: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, length). Returns (batch, length, words)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def main() -> None:
    """Build the job that the command line describes, and take two steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 24), ("width", 2048), ("heads", 16), ("words", 128256), ("length", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=1, help="sequences per GPU")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model; each is sharded (HSDP)")
    parser.add_argument("--keep-gathered", action="store_true", help="do not reshard after the forward pass")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of each block")
    parser.add_argument("--offload", action="store_true", help="shards and optimizer on the CPU")
    given = parser.parse_args()

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if given.offload else "nccl")
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cuda", (given.replicas, ranks // given.replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if given.replicas > 1 else mesh["shard"]
    with torch.device("meta"):
        model = Decoder(given.words, given.width, given.layers, given.heads)
    if given.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "reshard_after_forward": not given.keep_gathered,
    }
    if given.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if given.offload else "cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        tokens = torch.randint(given.words, (given.batch, given.length + 1), device="cuda")
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
