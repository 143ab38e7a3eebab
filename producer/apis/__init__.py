"""The HTTP API. Each folder or file is one part: it reads calls, writes answers, and has a
`router`."""
