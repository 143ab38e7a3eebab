"""Attention on a GPU, in Triton."""
