"""Has the names that SGLang and transformers import from torchvision. Text models use none.

The real package needs the PyTorch of its build.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """Ways to resize a picture."""

    NEAREST, NEAREST_EXACT, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS = range(7)


class _Module(types.ModuleType):
    """A module in which each name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012 # the mark of a package
    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


for _name in (
    *("io", "transforms", "transforms.functional"),
    *("transforms.v2", "transforms.v2.functional"),
):
    _parent, _, _child = f"torchvision.{_name}".rpartition(".")
    sys.modules[f"torchvision.{_name}"] = _Module(f"torchvision.{_name}")
    setattr(sys.modules[_parent], _child, sys.modules[f"torchvision.{_name}"])
