"""Measures, logs and traces the work of a worker."""
