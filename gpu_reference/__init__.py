"""Triton kernels on torch tensors: the GPU side of every operation. They run on CPU tensors in Triton's interpreter."""
