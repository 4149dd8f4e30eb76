"""PyTorch's caching allocator, modelled for one GPU."""
