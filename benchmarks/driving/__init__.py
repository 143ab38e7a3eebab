"""What several rows use to start a server, send it a workload and note when tokens come."""
