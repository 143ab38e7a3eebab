"""Batches of the HTTP API as they are kept: records in Redis, files in a folder."""
