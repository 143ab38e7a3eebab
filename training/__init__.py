"""Makes the shipped model; not installed."""
