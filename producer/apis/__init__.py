"""One folder or file for each part of the HTTP API: reads calls, writes answers, has a `router`."""
