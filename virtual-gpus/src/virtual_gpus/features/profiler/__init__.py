"""torch.profiler, with the GPUs on the modelled clock."""
