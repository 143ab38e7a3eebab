"""Engines behind HTTP: inference servers that compute what a worker claims."""
