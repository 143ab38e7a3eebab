"""The HTTP APIs. Each folder or file is one of them: it reads calls, writes answers, and has the
routes (`router`)."""
