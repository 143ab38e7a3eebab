"""Recurrent layers: modules that remember earlier tokens in a state of a fixed size.

transformers' modules would mix the requests of a packed step. So promptq recognises each such
module by its parts, and replaces its `forward` while the model serves. The module's linear layers
then compute all rows together, and the recurrence computes each sequence from its own state.
"""
