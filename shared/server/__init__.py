"""Connections to a server, and a server of one's own."""
