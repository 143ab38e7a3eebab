"""A model for workers in front of stand-ins of inference servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.stand_in_server.starting import save_byte_model


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes, and a chat template."""
    return save_byte_model(tmp_path_factory.mktemp("model"))
