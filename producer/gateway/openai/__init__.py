"""From what OpenAI's clients send to requests of the queue, and from events to what they read.

Pure: nothing here talks to a server or a client.
"""
