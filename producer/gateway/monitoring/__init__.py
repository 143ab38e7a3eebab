"""Routes for operators and their software: probes, metrics, API documentation, autoscaling."""
