"""/v1/responses: OpenAI's responses, and their records in Redis.

A response is one request with the same id. The queue has its state, log and result; the record in
Redis has the rest.
"""
