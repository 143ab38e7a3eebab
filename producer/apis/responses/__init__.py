"""/v1/responses: OpenAI's responses, and their records in Redis.

A response has one request, with the same id. The queue stores the request's state and output, which
are also those of the response. The response's record stores all other data. After the request's
end, the record also has a copy of the output.
"""
