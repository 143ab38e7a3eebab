"""Background work beside the queue: batch files, webhooks, upkeep.

It is one more producer. What a batch needs of a worker goes through the queue, like any request.
RQ runs the jobs (`promptq jobs`); the batch engine itself needs none of it.
"""
