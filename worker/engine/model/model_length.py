"""Determines the longest sequence that a model computes correctly."""

from __future__ import annotations

from typing import Any

from promptq.shared.errors import ConfigurationError, UnsupportedModelError
from promptq.worker.engine.model.loading import LoadedModel


def model_length(loaded: LoadedModel, wanted: int | None) -> int | None:
    """Returns how many tokens a sequence may have: `wanted`, or the model's limit if `wanted` is
    None.

    Returns None if there is no limit. Raises ConfigurationError if the model has fewer positions
    than `wanted`. Raises UnsupportedModelError if, at that length, the rotary embedding would make
    the positions of one sequence depend on other sequences in the batch.
    """
    limit: int | None = getattr(loaded.text_config, "max_position_embeddings", None)
    if limit is not None and limit < 1:
        raise UnsupportedModelError(f"{loaded.name}: its max_position_embeddings are {limit}")
    if wanted is not None and limit is not None and wanted > limit:
        raise ConfigurationError(
            f"--max-model-len: {wanted} is more than the {limit} positions that {loaded.name} has"
        )
    for rope in _rope_parameters(loaded.text_config):
        kind = rope.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        lengths = (rope.get("original_max_position_embeddings"), limit)
        stable = min((length for length in lengths if length), default=0)
        if wanted is not None and wanted > stable:
            raise UnsupportedModelError(
                f"{loaded.family}: its rotary embedding is of type {kind!r}, which changes all "
                f"positions in a batch once one sequence has more than {stable} tokens; with "
                f"--max-model-len {stable} it can be served"
            )
        limit = stable
    return limit if wanted is None else wanted


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Returns the settings of rotary embeddings: one set, or one set for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        [rope] if "rope_type" in rope else [one for one in rope.values() if isinstance(one, dict)]
    )
