"""What PyTorch and GPUtil see under CUDA_VISIBLE_DEVICES. Lesson 01 runs it, and so can you:

CUDA_VISIBLE_DEVICES=2,0 python scripts/visible_devices.py
"""

import os

import GPUtil
import torch

there = torch.accelerator.is_available()
device = torch.accelerator.current_accelerator() if there else torch.device("cpu")
gibibyte = torch.empty(2**28, device=device)  # float32: four bytes each

print(f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')!r}")
print(f"PyTorch sees {torch.cuda.device_count()} GPUs and puts 1 GiB on {gibibyte.device}")
for gpu in GPUtil.getGPUs():
    print(f"  the driver's GPU {gpu.id}: {gpu.memoryUsed:5.0f} MiB used")
