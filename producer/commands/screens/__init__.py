"""Formats the output of commands for a terminal."""
