"""Scaled dot-product attention as CUDA runs it."""
