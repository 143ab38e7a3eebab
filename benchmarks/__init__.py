"""Benchmarks. Each is one command that prints one table."""
