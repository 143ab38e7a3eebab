"""What probes, Prometheus and people ask a gateway about itself."""
