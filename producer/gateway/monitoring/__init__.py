"""Routes about the gateway itself: probes, metrics, documentation, autoscaling."""
