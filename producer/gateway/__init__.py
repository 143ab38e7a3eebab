"""The HTTP side: an OpenAI-compatible API and a dashboard, one more producer on the queue.

Nothing here knows a worker. What a request needs goes through `AsyncClient`, what a page shows
through the same keys that any client may read.
"""
