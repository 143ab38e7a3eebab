"""Reads what a model writes: its reasoning, the content, and calls of tools."""
