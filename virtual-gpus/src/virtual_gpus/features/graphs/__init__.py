"""CUDA graphs and memory pools."""
