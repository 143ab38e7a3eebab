"""What a worker holds: each request from its claim to its end."""
