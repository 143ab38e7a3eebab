"""Shows that a worker is alive, and notices workers that are not."""
