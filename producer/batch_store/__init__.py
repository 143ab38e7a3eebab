"""The storage for batches of the HTTP API: records in Redis, files in a folder."""
