"""Checks at load whether requests in a packed step get the same logits as each alone.

There is no mask, so a layer that does not go through the seam would silently mix the requests of
a packed step. So each model of any family is checked before it serves. Packed steps of two requests
must have the logits of each request alone with the library's eager attention and masks. Windows are
shrunk for the check, so that a few tokens reach past them. Weights are in fp32 where memory allows,
so that rounding does not hide a fault.
"""
