"""Program that every rank runs: a script, a module or an executable, with its arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Program:
    """Program and its arguments.

    Args:
        argv: a script (or, by `kind`, a module or an executable) and its arguments; never empty.
        kind: "script" and "module" run in Python, "command" is executed directly, "run_path" runs through `runpy`.
        passes_local_rank: put `--local_rank=N` before the arguments, as the `deepspeed` command does.
    """

    argv: tuple[str, ...]
    kind: str = "script"
    passes_local_rank: bool = False

    def argv_for_rank(self, local_rank: int) -> list[str]:
        """Return the command line of a rank. Python programs use this process's interpreter."""
        name, *arguments = self.argv
        if self.passes_local_rank:
            arguments = [f"--local_rank={local_rank}", *arguments]
        python = [sys.executable, "-u"]
        before = {"script": python, "module": [*python, "-m"], "run_path": [*python, "-c", _RUN_PATH], "command": []}
        return [*before[self.kind], name, *arguments]

    def to_json(self) -> dict[str, Any]:
        """Return the program as plain data for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """Create the program from the result of `to_json`."""
        return cls(tuple(data["argv"]), str(data["kind"]), bool(data["passes_local_rank"]))
