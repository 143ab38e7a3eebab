"""Runs the scripts of a program, and collects the attempts and the requests of the program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from promptq.worker.shipped import MODEL_DIR
from tests.programs.compat.catalogue import SCRIPTS, Program
from tests.programs.compat.environments import CACHE
from tests.programs.compat.page import NATIVE, Attempt
from tests.programs.compat.recorder import Exchange, recorded
from tests.programs.package.strangers import Stranger, running
from tests.support.processes import kill_all, start
from tests.support.servers import free_port

ALIAS = "gpt-4o"
"""A further name of the model, for programs that know a model by its name."""
_LENGTH = 2048
"""The most tokens of a sequence in other engines: as many as the shipped model takes."""


@dataclass(frozen=True)
class Served:
    """A running gateway, and the facts that its callers need."""

    url: str
    key: str
    model: str
    redis_url: str
    model_folder: Path

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0


@contextmanager
def served(python: Path, folder: Path, engine: str) -> Iterator[Served]:
    """Runs a gateway with a worker, jobs, an API key and an alias, with all files in `folder`.

    The engine `native` computes in the worker. With another engine, the worker forwards requests to
    a real server of that kind, which has the shipped model.
    """
    stranger = Stranger(python, folder, "promptq")
    stranger.environment["PROMPTQ_HTTP_CORS_ORIGINS"] = '["*"]'
    with ExitStack() as stack:
        options = []
        if engine != NATIVE:
            # Starts threads, and a process with threads cannot leave the network.
            from tests.programs.engines.real_servers import real_server, why_missing

            if why := why_missing(engine):
                raise SystemExit(f"{engine}: {why}")
            server = stack.enter_context(real_server(engine, folder / "server", length=_LENGTH))
            options = ["--engine", engine, "--upstream", server.url, "--model", str(MODEL_DIR)]
        url = stack.enter_context(running(stranger, *options))
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


_TRYING = SCRIPTS.parent / "trying"
_SECONDS = 900
_SILENT = {
    "AISUITE_TELEMETRY": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Environment variables that keep programs from calling other servers."""


def run(program: Program, gateway: Served, folder: Path) -> tuple[list[Attempt], list[Exchange]]:
    """Run a program's scripts. Returns the attempts, and the exchanges between the program and the
    gateway.

    The program's folder gets three files: `told` with the attempts, `exchanges.jsonl` with
    exchanges and their times, and `said` with the output. By the times, each exchange can be traced
    to an attempt.
    """
    own, port = CACHE / program.name, free_port()
    own_told, home = own / "told", folder / f"home-{program.name}"
    own_told.unlink(missing_ok=True)
    home.mkdir()
    url = f"http://127.0.0.1:{port}"
    environment = {
        **_SILENT,
        "HOME": str(home),
        "PATH": f"{own / 'venv/bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(_TRYING),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": gateway.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": gateway.key,
        "COMPAT_GATEWAY": gateway.url,
        "COMPAT_MODEL": gateway.model,
        "COMPAT_MODEL_FOLDER": str(gateway.model_folder),
        "COMPAT_REDIS": gateway.redis_url,
        "COMPAT_TOLD": str(own_told),
    }
    ends = []
    with recorded(port, gateway.port) as exchanges, (own / "said").open("w") as said:
        for script in program.scripts:
            process = start(
                *_command(program, script, own),
                env=environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            try:
                if code := process.wait(_SECONDS):
                    ends.append(f"the script ended with {code}: {_last_line(own / 'said')}")
            except subprocess.TimeoutExpired:
                ends.append(f"it was not done after {_SECONDS} seconds")
            finally:
                kill_all(process.pid)
                process.wait()
    (own / "exchanges.jsonl").write_text("".join(json.dumps(asdict(it)) + "\n" for it in exchanges))
    lines = own_told.read_text().splitlines() if own_told.exists() else []
    attempts = [
        Attempt(line["tried"], line["passed"], line["got"] or "", line["why"])
        for line in map(json.loads, lines)
    ]
    return [*attempts, *(Attempt("the rest", False, "", why) for why in ends)], exchanges


def _command(program: Program, script: str, own: Path) -> list[str | Path]:
    path = SCRIPTS / script
    if not program.is_node:
        return [own / "venv/bin/python", "-P", path]  # -P: no script hides a package of its name
    for file in (path, _TRYING / "trying.mjs"):  # beside the packages, where Node looks for them
        shutil.copy(file, own)
    return ["node", own / path.name]


def _last_line(said: Path) -> str:
    return (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
