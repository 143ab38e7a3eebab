"""Runs batch files through the queue, line by line."""
