"""Converts a call of an API to payloads for the queue, and the queue's events to parts of the
answer, without HTTP."""
