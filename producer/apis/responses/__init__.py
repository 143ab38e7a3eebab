"""/v1/responses: OpenAI's responses, and their records in Redis.

A response is one request of the queue, of the same id. Its state, its log and its result are the
queue's; only what the queue does not have is stored beside it.
"""
