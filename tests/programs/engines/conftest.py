"""These tests run real servers, which `python -m tests engines` builds first."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("PROMPTQ_TEST_ENGINES") else ["test_*.py"]
