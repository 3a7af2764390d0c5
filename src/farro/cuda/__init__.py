"""Native kernels: compiled at first use (jit), described to the copy engine (tensor_map), launched.

CUDA C++ is compiled by NVRTC through cuda.core; no nvcc and no CUDA_HOME. Imported on demand.
"""
