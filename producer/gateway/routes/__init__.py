"""One file for each part of the API; each has a `router`."""
