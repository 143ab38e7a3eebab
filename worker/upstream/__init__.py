"""Engines behind HTTP: inference servers that compute a worker's requests."""
