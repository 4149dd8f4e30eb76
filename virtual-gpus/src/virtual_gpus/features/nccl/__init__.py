"""How long NCCL takes, which `distributed` and `data_parallel` ask."""
