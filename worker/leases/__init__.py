"""The requests that a worker holds, each from its claim to its end."""
