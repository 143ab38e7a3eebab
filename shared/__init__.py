"""Code that producers and workers share: keys, payloads, scripts, settings."""
