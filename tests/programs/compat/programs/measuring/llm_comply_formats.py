"""llm-comply: its suites for three APIs. Each test of a suite counts as an attempt."""

from __future__ import annotations

import json
import subprocess

import trying
from trying import attempt

for form in ("openai-chat", "open-responses", "anthropic"):
    command = ["llm-comply", "--json", "--format", form, "-u", trying.URL, "-k", trying.KEY]
    command += ["-m", trying.MODEL]
    if form == "anthropic":
        command += ["--auth-header", "x-api-key", "--no-bearer"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    for result in json.loads(done.stdout)["results"]:
        if result["status"] == "skipped":  # it needs a model that reasons
            continue

        @attempt(f"{form}: {result['name']}")
        def _(result: dict[str, object] = result) -> str:
            assert result["status"] == "passed", result["errors"]
            return str(result["status"])
