"""Heartbeats, health probes and watchdogs of a worker, and the reaper, which returns the requests
of crashed workers to the queue."""
