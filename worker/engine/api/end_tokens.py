"""Which tokens end an output, as a model's configurations say."""

from __future__ import annotations

from collections.abc import Iterable


def end_token_ids(configurations: Iterable[object]) -> frozenset[int]:
    """Those of the first configuration that names any."""
    for configuration in configurations:
        ids = getattr(configuration, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset()
