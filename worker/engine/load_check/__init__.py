"""Checks at load whether requests in a packed step get the same logits as each request alone.

Packed steps have no mask. A layer that bypasses promptq's attention would silently mix the requests
of a step. So each model is checked before it serves. Packed steps of two requests must have the
logits that transformers computes for each single request, with eager attention and masks. The check
makes attention windows so small that the few tokens of a request exceed them. The check computes in
fp32 if there is enough memory, so that rounding does not hide a fault.
"""
