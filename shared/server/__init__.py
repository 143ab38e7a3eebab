"""Connections to a Redis server, and the embedded server."""
