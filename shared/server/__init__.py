"""Connections to a server, and the embedded server."""
