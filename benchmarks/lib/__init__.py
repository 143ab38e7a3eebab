"""Helpers of rows: they start a server or a peer, send a workload and note when tokens come."""
