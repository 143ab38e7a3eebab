"""Settings that all processes have, and settings of workers, from the environment."""
