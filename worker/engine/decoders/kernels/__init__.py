"""Triton kernels for the GPU, which compute a decoder layer in nine launches."""
