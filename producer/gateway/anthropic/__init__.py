"""/v1/messages: from what Anthropic's clients send to chats, and from events to what they read.

Pure: nothing here talks to a server or a client.
"""
