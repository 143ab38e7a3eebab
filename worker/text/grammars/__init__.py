"""Compiles the schema or tools of a request into masks for its output."""
