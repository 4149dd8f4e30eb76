"""Train a small Transformer whose feed-forward layers are experts, which are divided among GPUs. See lesson 11.

    torchrun --standalone --nproc-per-node 2 experts.py     # on the CPU if there are no GPUs
    torchrun --standalone --nproc-per-node 2 -m virtual_gpus --gpus 2 experts.py     # on virtual GPUs

Each process trains on its share of every batch and has its share of the experts of each layer. A router chooses --top-k
experts for each token. Tokens travel to the processes that have their experts, and the results travel back. Without
--capacity, the losses are the same on any number of processes. A token is a byte of the file.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

DATA = Path(__file__).parent / "../../data/pride_and_prejudice.txt"  # the novel that comes with the course
# LOCAL_RANK numbers the processes on this machine, RANK those on all machines. GPUs are numbered per machine.
LOCAL_RANK = os.environ.get("LOCAL_RANK", "0")
DEVICE = torch.device(f"cuda:{LOCAL_RANK}" if torch.cuda.is_available() else "cpu")


class Exchange(torch.autograd.Function):
    """Send rows to all processes: the first send[0] rows to rank 0, the next send[1] to rank 1, and so on."""

    @staticmethod
    def forward(ctx, rows, receive, send):
        ctx.way_back = send, receive  # The gradient of a row goes back to the process that has sent the row.
        received = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receive, send)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.way_back), None, None


class Experts(nn.Module):
    """A mixture of experts in place of a feed-forward layer: (N, T, width) -> (N, T, width)."""

    def __init__(self, width, experts, top_k, capacity):
        super().__init__()
        self.top_k, self.capacity = top_k, capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.own, self.experts = experts // dist.get_world_size(), nn.ModuleList()
        for number in range(experts):  # All processes draw the same weights, and each keeps those of its own experts.
            expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            if number // self.own == dist.get_rank():
                self.experts.append(expert)

    def forward(self, x):
        rank, ranks, experts = dist.get_rank(), dist.get_world_size(), self.router.out_features
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k)

        # Sort by expert, and so also by process. A token with two experts is there twice.
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        count = chosen.bincount(minlength=experts)
        counts = count.new_empty(ranks * experts)  # how many tokens of each process chose each expert
        dist.all_gather_into_tensor(counts, count)
        kept = counts
        if self.capacity:
            # An expert takes `places` tokens from each process. The others have the shortcut around this layer only.
            places = math.ceil(self.capacity * len(chosen) / experts)
            kept = counts.clamp(max=places)
            place = torch.arange(len(order), device=x.device) - (count.cumsum(0) - count)[chosen[order]]
            order = order[place < places]

        # Python needs these numbers to make the tensors that receive, so it waits for the GPU here, in every layer.
        parts = kept.view(ranks, ranks, self.own).cpu()  # from each process, to each process, for each expert there
        send, receive = parts[rank].sum(1).tolist(), parts[:, rank].sum(1).tolist()
        rows = Exchange.apply(tokens[order // self.top_k], receive, send)

        # The rows are sorted by their senders. Sort them by this process's experts, and afterwards back.
        expert_of_row = torch.arange(self.own).repeat(ranks).repeat_interleave(parts[:, rank].flatten())
        by_expert = expert_of_row.argsort(stable=True).to(x.device)
        inputs = rows[by_expert].split(parts[:, rank].sum(0).tolist())
        outputs = [expert(each) for expert, each in zip(self.experts, inputs, strict=True)]
        outputs = Exchange.apply(torch.cat(outputs)[by_expert.argsort()], send, receive)

        # The router learns from its weights. With one expert, weights that are divided by their sum would always be 1.
        outputs = outputs * weights.flatten()[order, None]
        result = torch.zeros_like(tokens).index_add(0, order // self.top_k, outputs)
        self.share = counts.view(ranks, experts).sum(0) / counts.sum()  # of all choices, before tokens are dropped
        self.dropped = 1 - kept.sum() / counts.sum()
        # The load-balancing loss of the Switch Transformer: 1 if the router chooses all experts equally often.
        self.balance = experts * (self.share * probabilities.mean(0)).sum()
        return result.view_as(x)


class Block(nn.Module):
    def __init__(self, width, heads, *options):
        super().__init__()
        self.heads = heads
        self.norm1, self.inputs, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.feed_forward = nn.LayerNorm(width), Experts(width, *options)

    def forward(self, x):
        query, key, value = self.inputs(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """Tokens (N, T) -> logits (N, T, 256)."""

    def __init__(self, sequence, *options, width=64, heads=4, layers=2):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(sequence, width)
        self.blocks = nn.Sequential(*(Block(width, heads, *options) for _ in range(layers)))
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, tokens):
        return self.output(self.blocks(self.embedding(tokens) + self.positions.weight))


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="a file whose bytes are the tokens")
    parser.add_argument("--experts", type=int, default=8, help="experts of each layer, on all GPUs together")
    parser.add_argument("--top-k", type=int, default=2, choices=(1, 2), help="experts of each token")
    parser.add_argument("--balance", type=float, default=0.01, help="the weight of the load-balancing loss")
    parser.add_argument("--capacity", type=float, help="drop tokens above this multiple of an expert's equal share")
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step, on all GPUs together")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    for name, value in vars(args).items():
        if type(value) in (int, float) and not value > 0 and name != "balance":
            raise SystemExit(f"--{name.replace('_', '-')} is {value}. It must be more than 0.")
    if not args.data.is_file() or args.data.stat().st_size <= args.sequence:
        raise SystemExit(f"{args.data} is not a file with more than {args.sequence} bytes. Give --data another file.")
    return args


def main():
    args = parse_arguments()
    if "RANK" not in os.environ:
        raise SystemExit(f"Start this program with torchrun: torchrun --standalone --nproc-per-node 2 {__file__}")
    ranks = int(os.environ["WORLD_SIZE"])
    if args.experts % ranks or args.batch_size % ranks or args.experts < args.top_k:
        raise SystemExit(
            f"--experts {args.experts} and --batch-size {args.batch_size} must be multiples of {ranks}, the number of "
            f"processes, and --experts must be at least --top-k {args.top_k}."
        )
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")

    torch.manual_seed(0)  # All processes need the same weights, except for their experts.
    model = Transformer(args.sequence, args.experts, args.top_k, args.capacity).to(DEVICE)
    layers = [block.feed_forward for block in model.blocks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    text = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8)
    for step in range(1, args.steps + 1):
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - args.sequence, (args.batch_size, 1), generator=random)
        sequences = text[starts.chunk(ranks)[dist.get_rank()] + torch.arange(args.sequence + 1)].long().to(DEVICE)
        loss = cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
        (loss + args.balance * sum(layer.balance for layer in layers)).backward()
        for name, weight in model.named_parameters():
            # An expert has seen the tokens of all processes, so its gradient is a sum over them already. All other
            # gradients come from this process's tokens. DistributedDataParallel would average both kinds.
            if ".experts." not in name:
                dist.all_reduce(weight.grad)
            weight.grad /= ranks  # the mean, since the loss of each process is a mean over its own tokens
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            total = loss.detach() / ranks
            dist.all_reduce(total)
            busiest = max(layer.share.max().item() for layer in layers)
            dropped = sum(layer.dropped.item() for layer in layers) / len(layers)
            line = f"step {step} | loss {total.item():.4f} | busiest expert {busiest:.1%} | dropped {dropped:.1%}"
            if dist.get_rank() == 0:
                print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
