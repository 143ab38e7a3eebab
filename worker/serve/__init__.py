"""The process of a worker: code that builds, runs and ends the parts of the worker."""
