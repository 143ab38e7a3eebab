"""Weights of 8 or 4 bits."""
