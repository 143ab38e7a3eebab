"""The process of a worker: puts its parts together, runs them and ends them."""
