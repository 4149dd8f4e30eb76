"""Compute metrics of torchmetrics on every rank, which gather their states over the ranks."""

import os

import torch
import torch.distributed as dist
import torchmetrics

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.is_available()
device = torch.device("cuda", rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
torch.manual_seed(0)
scores, labels = torch.randn(64, 5), torch.randint(0, 5, (64,))
metrics = torchmetrics.MetricCollection(
    {
        "accuracy": torchmetrics.Accuracy(task="multiclass", num_classes=5),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=5),
        "confusion": torchmetrics.ConfusionMatrix(task="multiclass", num_classes=5),
        "mean": torchmetrics.MeanMetric(),
    }
).to(device)
part = slice(rank * 64 // ranks, (rank + 1) * 64 // ranks)
for name in ("accuracy", "auroc", "confusion"):
    metrics[name].update(scores[part].softmax(1).to(device), labels[part].to(device))
metrics["mean"].update(scores[part].to(device))
for value in metrics.compute().values():  # a metric has no gradient: this lets the witness note its value
    value.double().pow(2).mean().to(device).requires_grad_().backward()
dist.destroy_process_group()
