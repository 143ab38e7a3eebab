"""Parses a model's text into reasoning, content and calls of tools."""
