"""What rows use to start a server or a peer, send it a workload and note when tokens come."""
