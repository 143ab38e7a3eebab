"""What the programs are run against: `promptq up` of the wheel, with the shipped model."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.programs.package.strangers import Stranger, running

ALIAS = "gpt-4o"
"""A further name of the model, for programs that know a model by its name."""


@dataclass(frozen=True)
class Served:
    """A running gateway, and what its callers have to know."""

    url: str
    key: str
    model: str
    redis_url: str
    model_folder: Path

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0


@contextmanager
def served(python: Path, folder: Path) -> Iterator[Served]:
    """A gateway with a worker, jobs, an API key and an alias, all in `folder`, until the end."""
    stranger = Stranger(python, folder, "promptq")
    stranger.environment["PROMPTQ_HTTP_CORS_ORIGINS"] = '["*"]'
    with running(stranger) as url:
        key = json.loads(stranger.run("promptq", "keys", "create", "compat", "--json"))["key"]
        request = urllib.request.Request(
            f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}
        )
        with urllib.request.urlopen(request) as answer:
            model = json.load(answer)["data"][0]["id"]
        stranger.run("promptq", "models", "alias", ALIAS, model)
        redis_url = stranger.run("promptq", "url").strip()
        where = "import promptq.worker.shipped as s; print(s.MODEL_DIR)"
        yield Served(url, key, model, redis_url, Path(stranger.run("python", "-c", where).strip()))
