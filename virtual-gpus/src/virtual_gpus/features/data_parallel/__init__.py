"""nn.DataParallel: copies among the GPUs of one process."""
