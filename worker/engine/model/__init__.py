"""Runs a transformers model on packed batches."""
