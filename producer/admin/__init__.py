"""Reads and controls a whole queue."""
