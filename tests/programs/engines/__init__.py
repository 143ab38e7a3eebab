"""The real inference servers behind workers: `python -m tests engines`."""
