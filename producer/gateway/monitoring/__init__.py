"""Routes about the gateway itself: probes, metrics, API documentation, autoscaling."""
