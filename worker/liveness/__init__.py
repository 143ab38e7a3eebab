"""Tells that a worker lives, and notices that one does not."""
