"""/v1/responses: OpenAI's responses, and their records in Redis.

A response has one request, with the same id. The queue has the request's state and output, which
are also those of the response. The response's record has everything else, and a copy of the output
after the request has ended.
"""
