"""The clients: they enqueue requests and stream tokens."""
