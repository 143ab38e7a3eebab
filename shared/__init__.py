"""What producers and workers agree on: keys, payloads, scripts, settings."""
