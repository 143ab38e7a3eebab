"""The engine's core: sequences, blocks and the scheduler. This package does not import torch."""
