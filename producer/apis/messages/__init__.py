"""/v1/messages, as Anthropic's clients send and read it."""
