"""The HTTP side: OpenAI-compatible APIs and a dashboard, one more producer on the queue.

Nothing here talks to a worker. Requests go through `AsyncClient`, and pages show what any client
may read from the queue's keys.
"""
