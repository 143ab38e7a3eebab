"""What every process has: settings, logs, metrics, tracing, tasks."""
