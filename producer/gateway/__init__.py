"""The HTTP gateway: OpenAI-compatible APIs and a dashboard.

The gateway is a producer like any other, and never communicates with a worker. It sends requests
through `AsyncClient`, and its pages show data from keys that any client may read.
"""
