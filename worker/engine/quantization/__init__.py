"""Weights with 8 or 4 bits per number."""
