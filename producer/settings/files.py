"""The setting that gateways and jobs share: the folder for files."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from promptq.shared.settings.common import Settings


def _default_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "promptq" / "files"


class FilesSettings(Settings):
    """Settings of processes that store files."""

    files_dir: Path = Field(
        default_factory=_default_folder,
        description="folder for uploaded files and the answers of batches, the same one for gateway"
        " and jobs; default: ~/.local/share/promptq/files",
    )
