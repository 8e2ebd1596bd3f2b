"""What every rank runs: a script, a module or a program, and the words that follow it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PROGRAM_KINDS = ("script", "module", "command", "run_path")

_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@dataclass(frozen=True)
class Program:
    """`words` are a script (or, by `kind`, a module or a program) and its arguments.

    Args:
        words: never empty.
        kind: "script" and "module" run in Python, "command" is executed as it is, "run_path" goes through `runpy`.
        local_rank: whether `--local_rank=N` is put before the arguments, as the `deepspeed` command does.
    """

    argv: tuple[str, ...]
    kind: str = "script"
    passes_local_rank: bool = False

    def argv_for_rank(self, local_rank: int) -> list[str]:
        """The words to execute on this machine, by this Python."""
        name, *arguments = self.argv
        if self.passes_local_rank:
            arguments = [f"--local_rank={local_rank}", *arguments]
        python = [sys.executable, "-u"]
        before = {"script": python, "module": [*python, "-m"], "run_path": [*python, "-c", _RUN_PATH], "command": []}
        return [*before[self.kind], name, *arguments]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """The program that `as_json` described."""
        return cls(tuple(data["argv"]), str(data["kind"]), bool(data["passes_local_rank"]))
