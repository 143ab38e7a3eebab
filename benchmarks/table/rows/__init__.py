"""One file for each row of the table. Each runs the workloads on one engine."""
