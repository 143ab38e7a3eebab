"""The kinds of inference servers: one file for each, and their common code."""
