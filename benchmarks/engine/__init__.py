"""Measurements of the engine and of a worker's threads, one module each."""
