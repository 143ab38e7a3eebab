"""Puts native code for the usual kinds of processors into a wheel.

Without a C++ compiler, or for another machine than Linux on x86-64, the wheel has none: workers
compile it at their first start.
"""

from __future__ import annotations

import platform
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("worker/engine/native")


class NativeCodeHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            return
        build = runpy.run_path(str(Path(self.root, NATIVE, "build.py")))
        kinds = len(build["KINDS"])
        self.app.display_waiting(f"Compiling native code for {kinds} kinds of processors: minutes")
        self._folder = tempfile.TemporaryDirectory(prefix="promptq-native-")
        try:
            made = build["build_for"](build["KINDS"], Path(self._folder.name))
        except build["NativeCodeError"] as error:
            self.app.display_warning(f"a wheel without native code: {error}")
            return
        for path in made:
            build_data["force_include"][str(path)] = f"promptq/{NATIVE}/built/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"  # auditwheel says for which systems it is

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if folder := getattr(self, "_folder", None):
            folder.cleanup()
