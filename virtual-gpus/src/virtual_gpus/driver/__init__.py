"""What NVIDIA's driver would tell tools about the virtual GPUs: NVML and nvidia-smi. Does not import torch."""
