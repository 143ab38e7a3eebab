"""Measures the queue: memory for each request, time in a long queue."""
