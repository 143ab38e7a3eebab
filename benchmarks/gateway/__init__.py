"""Measures the delay that the gateway adds to a token, with a bare relay for comparison."""
