"""Batch, layer, group and RMS norm, and batch norm over several GPUs."""
