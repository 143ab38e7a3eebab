"""The HTTP gateway: OpenAI-compatible APIs and a dashboard. For the queue, the gateway is one more
producer.

The gateway never talks to a worker. Requests go through `AsyncClient`, and pages show what any
client may read from the queue's keys.
"""
