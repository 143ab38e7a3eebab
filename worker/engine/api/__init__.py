"""The messages between a worker and an engine; no torch here."""
