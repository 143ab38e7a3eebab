"""The HTTP APIs. Each folder has one API: code that reads calls, code that writes answers, and the
routes (`router`). A small API is a single file."""
