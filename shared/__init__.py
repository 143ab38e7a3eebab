"""The agreement of producers and workers: keys, payloads, scripts, settings."""
