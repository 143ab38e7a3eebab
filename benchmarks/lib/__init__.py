"""Helpers for the rows of the table: they start a server or another engine, send a workload and
record when tokens come."""
