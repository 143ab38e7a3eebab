"""From the schema or the tools of a request to the masks of its output."""
