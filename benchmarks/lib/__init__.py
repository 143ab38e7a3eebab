"""Helpers of rows: they start a server or a peer, send a workload and record when tokens come."""
