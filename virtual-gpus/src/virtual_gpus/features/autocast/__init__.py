"""`torch.autocast` as CUDA casts."""
