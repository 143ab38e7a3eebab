"""The rows of the table, one file for each. Each file runs the workloads on one engine."""
