"""/v1/responses: OpenAI's responses, and their records in Redis.

A response has one request, with the same id. The state and the output of the response are those of
this request, in a queue. The record has everything else, and the output once it is complete.
"""
