"""What NVIDIA's driver would tell tools about the virtual GPUs: nvidia-smi. Does not import torch."""
