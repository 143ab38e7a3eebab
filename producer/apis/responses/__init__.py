"""/v1/responses: OpenAI's responses, and their records in Redis.

A response has one request, with the same id. The response's state and output are those of the
request, in the queue. The response's record has all other data, and after the request's end a copy
of the output.
"""
