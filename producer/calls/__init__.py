"""Converts API calls to payloads, and events to parts of answers, without HTTP."""
