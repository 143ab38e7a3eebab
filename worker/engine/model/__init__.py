"""A transformers model that computes packed batches."""
