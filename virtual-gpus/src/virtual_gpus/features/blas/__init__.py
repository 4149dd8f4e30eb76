"""Products of matrices as cuBLAS computes them."""
