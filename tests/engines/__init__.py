"""The real inference servers behind workers: `make test-engines`."""
