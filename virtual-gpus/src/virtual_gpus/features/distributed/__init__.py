"""torch.distributed: process groups, collectives and messages, with NCCL's rules."""
