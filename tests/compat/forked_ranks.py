"""Ranks of client scripts, forked from a process that has imported the clients.

An import of transformers' Trainer takes longer than most of the runs. `python -m tests.compat.forked_ranks` imports it
once. For each request it forks a process, which imports the script's modules and then forks the ranks.
"""

from __future__ import annotations

import ast
import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PRELOADED = ("torch._dynamo", "transformers.models.llama.modeling_llama", "transformers.trainer", "accelerate", "peft")


@dataclass(frozen=True)
class Request:
    """Script to run on `ranks` ranks. Rank R writes its output to `outputs`/R.out and R.err."""

    script: str
    arguments: list[str]
    ranks: int
    outputs: str
    port: int


class ForkingServer:
    """Process that forks ranks, for one set of environment variables. It ends with the interpreter."""

    def __init__(self, env: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.compat.forked_ranks"]
        self._process = subprocess.Popen(
            command, env=dict(env), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        atexit.register(self.close)

    def run(self, script: str | Path, arguments: Sequence[object], ranks: int, seconds: float) -> tuple[bool, str]:
        """Run a script on `ranks` ranks; 0 starts one without a launcher's variables. Return success and output."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as outputs:
            request = Request(str(script), [str(a) for a in arguments], ranks, outputs, free_port())
            self._process.stdin.write(json.dumps([asdict(request), seconds]).encode() + b"\n")
            self._process.stdin.flush()
            codes = json.loads(self._process.stdout.readline())
            files = sorted(Path(outputs).iterdir(), key=lambda file: (file.suffix == ".err", file.name))
            text = "".join(file.read_text(errors="replace") for file in files)
        return not any(codes), f"{text}\nexit codes of the ranks: {codes}" if any(codes) else text

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    import windlass

    windlass.initialize  # noqa: B018  (its first access imports the modules)
    gc.freeze()
    for line in sys.stdin.buffer:
        fields, seconds = json.loads(line)
        request = Request(**fields)
        if (template := os.fork()) == 0:
            os.setsid()
            replies.close()
            _run_ranks(request)
        codes = _wait(template, Path(request.outputs), seconds)
        replies.write(json.dumps(codes) + "\n")
        replies.flush()


def _wait(template: int, outputs: Path, seconds: float) -> list[int]:
    """Return the exit codes of the ranks. After `seconds` all of them are killed."""
    until = time.monotonic() + seconds
    while os.waitpid(template, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.killpg(template, signal.SIGKILL)
            os.waitpid(template, 0)
            return [-signal.SIGKILL]
        time.sleep(0.02)
    codes = outputs / "codes"
    result = json.loads(codes.read_text()) if codes.exists() else [1]
    codes.unlink(missing_ok=True)
    return list(result)


def _run_ranks(request: Request) -> NoReturn:
    """Import what the script imports, fork the ranks, and wait for them."""
    outputs = Path(request.outputs)
    _redirect(outputs / "imports")
    sys.path.insert(0, str(Path(request.script).parent))
    tree = ast.parse(Path(request.script).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), request.script, "exec"), {"__name__": "imports"})
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, f"an import of {request.script} started {threads - 1} threads, which a fork does not copy"
    gc.freeze()
    ranks = []
    for rank in range(max(1, request.ranks)):
        if (child := os.fork()) == 0:
            _run_script(request, rank)
        ranks.append(child)
    codes = dict.fromkeys(ranks, 1)
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:  # as the launcher does: the other ranks would wait for the failed one
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    (outputs / "codes").write_text(json.dumps(list(codes.values())))
    os._exit(0)


def _run_script(request: Request, rank: int) -> NoReturn:
    _redirect(Path(request.outputs) / str(rank))
    if request.ranks:
        from windlass.launch.rank_placement import RankPlacement

        os.environ |= RankPlacement(rank, rank, 0, "localhost", request.ranks, request.ranks, 1).environment()
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request.port)}
    sys.argv = [request.script, *request.arguments]
    code = 0
    try:
        runpy.run_path(request.script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(outputs: Path) -> None:
    """Write this process's output to files; the script reads an empty input."""
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        file = os.open(outputs.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)


if __name__ == "__main__":
    _serve()
