"""Checks at load whether requests in a packed step get the same logits as each request alone.

Packed steps have no mask. A layer that bypasses promptq's attention would silently mix the requests
of a step. So each model is checked before it serves: packed steps of two requests must have the
logits that transformers computes for each request alone, with its eager attention and masks. The
check shrinks attention windows, so that a few tokens reach past them. It computes in fp32 where
memory allows, so that rounding does not hide a fault.
"""
