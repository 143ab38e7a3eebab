"""Checks and measures the engine on a GPU: `python -m benchmarks.gpu`."""
