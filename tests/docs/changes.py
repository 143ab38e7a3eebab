"""Applies the examples of docs/design/cost-of-a-change.md to copies of the tree.

Arguments choose examples by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.paths import ROOT

PATCHES = {path.stem: path for path in (ROOT / "docs/design/changes").glob("*.patch")}
TESTS = {
    "sampling-parameter": [
        "tests/docs/test_links.py",
        "tests/producer/gateway/openai/test_completions.py",
        "tests/shared/protocol",
        "tests/worker/engine/sampling",
        "tests/worker/engine/test_bench_gpu.py",
    ],
    "attention-backend": [
        "tests/worker/engine/attention/test_attention.py",
        "tests/worker/engine/runner/test_right_tokens.py::test_every_attention_backend",
    ],
    "model-family": [
        *("--whole", "-k", "vaultgemma"),
        "tests/worker/engine/decoders/test_layer_parts.py",
        "tests/worker/engine/runner/test_right_tokens.py",
    ],
}


def git(folder: Path, *arguments: str | Path) -> str:
    return subprocess.run(
        ["git", *map(str, arguments)], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def try_change(name: str) -> bool:
    """Whether the tests pass."""
    with TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").split("\n"):
            if path and (ROOT / path).exists():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, copy / path, follow_symlinks=False)
        git(copy, "apply", PATCHES[name])
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS[name]]
        environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}"}
        return subprocess.run(command, cwd=copy, env=environment).returncode == 0


if __name__ == "__main__":
    failed = [name for name in sys.argv[1:] or sorted(PATCHES) if not try_change(name)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
