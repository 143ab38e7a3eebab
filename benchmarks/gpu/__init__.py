"""What the engine does on a GPU, checked and measured: `python -m benchmarks.gpu`."""
