"""Which queue each of several models has."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptq.shared.errors import ConfigurationError
from promptq.shared.settings.model_queues import queues_of_models


def test_a_queue_is_named_like_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    models = ["first", "Qwen/Qwen3-0.6B", "weights/Small Q8.gguf", str(folder)]
    names = ["default", "Qwen3-0.6B", "Small-Q8", "folder.gguf"]
    assert queues_of_models(models, [], "default") == dict(zip(names, models, strict=True))


@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_two_models_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    models = [tmp_path / "a" / name, tmp_path / "b" / name]
    for model in models:
        model.parent.mkdir()
        model.touch() if model.suffix else model.mkdir()
    with pytest.raises(ConfigurationError, match="would have one name, by which clients find them"):
        queues_of_models([*map(str, models)], ["a", "b"], "default")
