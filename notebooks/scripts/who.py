"""Print which process this is. Start it with torchrun on every machine before the first real job.

torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node-1:29500 who.py
"""

import os

names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
line = " | ".join(f"{name} {os.environ[name]}" for name in names)
print(f"{line}\n", end="", flush=True)  # the line's end in the same write, or the ranks' lines run into each other
