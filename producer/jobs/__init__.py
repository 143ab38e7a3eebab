"""Background work beside the queue: batch files, webhooks, upkeep.

It is one more producer: a batch sends its lines to workers through the queue, like any client.
RQ runs the jobs (`promptq jobs`). The code that runs a batch does not need RQ.
"""
