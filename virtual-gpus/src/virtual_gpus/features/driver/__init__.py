"""What programs ask the driver and CUDA's runtime."""
