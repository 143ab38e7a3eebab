"""Runs packed batches through a model: eagerly, compiled, or as CUDA graphs."""
