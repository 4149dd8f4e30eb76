"""Convolutions as cuDNN runs them."""
