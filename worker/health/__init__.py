"""Heartbeats, probes and watchdogs of a worker, and the reaper of crashed workers' requests."""
