"""What the queue costs: memory for each request, time in a long one."""
