"""A script that is broken in one place."""

from __future__ import annotations

from dataclasses import dataclass

from promptq.shared.queue.call import SCRIPT_NAMES, script_text
from tests.programs.states.world import World
from tests.programs.states.worlds import SMALL


@dataclass(frozen=True)
class Mutant:
    """Each script whose name begins with `script` has `new` where `old` stood."""

    breaks: str
    script: str
    old: str
    new: str
    world: World = SMALL["one request, everything but that it is forgotten"]

    def texts(self) -> dict[str, str]:
        """All scripts by name, some of them broken. Raises ValueError where `old` is not there."""
        texts = {name: script_text(name) for name in SCRIPT_NAMES}
        broken = {
            name: text.replace(self.old, self.new)
            for name, text in texts.items()
            if name.startswith(self.script) and text.count(self.old) == 1
        }
        if not broken:
            raise ValueError(f"{self.old!r} does not stand once in any script {self.script}")
        return texts | broken


ALL_SCRIPTS = ""
