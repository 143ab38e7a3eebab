"""The clients: requests in, token streams out."""
