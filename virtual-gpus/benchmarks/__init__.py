"""What virtual GPUs cost, and how near they are to a real one. Run them from the folder virtual-gpus."""
