"""Secrets leave the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CODE = """
import json, os, subprocess, sys
from promptq.shared.settings.secrets import forget_secrets
from promptq.shared.settings.common import read_settings
url = read_settings().redis_url
os.environ["PROMPTQ_UPSTREAM_KEY"] = "set-later"
forget_secrets()
child = subprocess.run(["env"], capture_output=True, text=True).stdout
shown = open("/proc/self/environ").read() + child + repr(dict(os.environ))
print(json.dumps([url, shown]))
"""


def test_what_was_read_is_in_no_view_of_the_environment() -> None:
    """In a process of its own, whose environment this cannot be."""
    secrets = {
        "PROMPTQ_REDIS_URL": "redis://:pass-1@h",
        "PROMPTQ_WEBHOOK_SECRET": "pass-2",
        "PROMPTQ_JOBS_REDIS_URL": "redis://:pass-3@h",
    }
    ran = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **secrets, "PROMPTQ_QUEUE": "kept"},
        capture_output=True,
        text=True,
        check=True,
    )
    url, shown = json.loads(ran.stdout)
    assert url == secrets["PROMPTQ_REDIS_URL"]
    assert "kept" in shown
    for secret in ("pass-1", "pass-2", "pass-3", "set-later"):
        assert secret not in shown
