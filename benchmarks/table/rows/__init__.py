"""One file for each row of the table: how one engine is driven through the workloads."""
