"""Which tokens end an output, as a model's configurations say."""

from __future__ import annotations

from collections.abc import Iterable

from promptq.shared.errors import UnsupportedModelError


def end_token_ids(configurations: Iterable[object]) -> frozenset[int]:
    """Those of the first configuration that names any.

    Raises UnsupportedModelError if one of them is no token id.
    """
    for configuration in configurations:
        ids = getattr(configuration, "eos_token_id", None)
        if ids is not None:
            ids = ids if isinstance(ids, (list, tuple)) else [ids]
            for token_id in ids:
                if type(token_id) is not int:
                    raise UnsupportedModelError(
                        f"the model's files: eos_token_id: {token_id!r:.80} is no token id"
                    )
            return frozenset(ids)
    return frozenset()
