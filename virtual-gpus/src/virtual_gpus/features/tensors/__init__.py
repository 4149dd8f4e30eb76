"""torch.Tensor and its storage, as they answer for a GPU."""
