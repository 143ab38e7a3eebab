"""Parses the text that a model writes: reasoning, content, and calls of tools."""
