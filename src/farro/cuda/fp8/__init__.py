"""Native FP8 kernels for SM90a that the linear operators share: large.cu, small.cu, gemm.py."""
