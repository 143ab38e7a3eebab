"""Triton kernels for the GPU: a decoder layer in nine launches."""
