"""torch.compile and torch._dynamo, and kernels that a program compiles for itself."""
