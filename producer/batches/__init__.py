"""Runs batch files, line by line, through the queue."""
