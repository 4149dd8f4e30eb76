"""Programs that nobody here wrote, run as they are on virtual GPUs."""
