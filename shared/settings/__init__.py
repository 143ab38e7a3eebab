"""Settings of all processes and of workers, from the environment."""
