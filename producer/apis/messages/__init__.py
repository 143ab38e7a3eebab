"""/v1/messages, compatible with Anthropic's API."""
