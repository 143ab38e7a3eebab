"""The messages between a worker and an engine. This package does not import torch."""
