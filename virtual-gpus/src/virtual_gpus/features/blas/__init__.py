"""Matrix products: cuBLAS, cublasLt and their workspaces."""
