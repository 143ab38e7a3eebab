"""Answers probes, Prometheus and people who ask a gateway about itself."""
