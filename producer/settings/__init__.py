"""Settings of gateways and jobs, from the environment."""
