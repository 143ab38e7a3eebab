"""The kinds of inference servers: one file for each, and what all of them use."""
