"""Stands before vLLM's llguidance on Python's path, and loads the worker's version if vLLM's is
older than 1.9.

vLLM 0.32 requires an older version. That version allows more white space than the worker does, so
answers would break the worker's rules.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.metadata import version
from importlib.util import module_from_spec
from pathlib import Path


def _load() -> None:
    """Replace this module by the chosen library. Raises ImportError."""
    path = [folder for folder in sys.path if Path(folder) != Path(__file__).parent]
    is_old = [*map(int, version(__name__).split(".")[:2])] < [1, 9]
    if is_old and (ours := os.environ.get("PROMPTQ_LLGUIDANCE")):
        path = [ours]
    spec = PathFinder.find_spec(__name__, path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(__name__, name=__name__)
    sys.modules[__name__] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "llguidance":
    _load()
