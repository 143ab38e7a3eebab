"""The texts that the shipped model learns from."""
