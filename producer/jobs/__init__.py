"""The background work of a queue: batch files, webhooks, upkeep.

For the queue, a batch is one more producer: it sends its lines to workers as requests. RQ runs the
jobs (`promptq jobs`). The code that runs a batch does not depend on RQ.
"""
