"""torch.cuda: devices, memory, random generators."""
