"""What happens to each operator: its devices, its kernel, the memory of its results."""
