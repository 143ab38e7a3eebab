"""Parts of every process: logs, metrics, tracing, tasks."""
