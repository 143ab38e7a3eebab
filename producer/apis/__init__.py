"""The HTTP APIs. Each folder has the code of one API: it reads calls, writes answers, and has the
routes (`router`). A small API is a single file."""
