"""DeepSpeed as a baseline: operators that this machine can build, and configurations for DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CPU_OPTIMIZER_BUILDER, ASYNC_IO_BUILDER = "CPUAdamBuilder", "AsyncIOBuilder"
"""Builders of DeepSpeed's operators for optimizer states in host memory, and for states in files."""

# In a separate process: importing DeepSpeed takes seconds, and a build writes to the terminal.
_BUILD_PROGRAM = """
import contextlib, io, json, re, sys
from windlass.cli.benches.bench_engines import import_deepspeed
import_deepspeed()
from deepspeed.accelerator import get_accelerator
found = {}
for name in sys.argv[1:]:
    builder = get_accelerator().create_op_builder(name)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            if builder.is_compatible(verbose=True):
                builder.load(verbose=False)
        plain = re.sub(r"\\x1b\\[\\d*m|\\[WARNING\\]", " ", said.getvalue()).strip().splitlines()
        found[name] = "" if builder.is_compatible(verbose=False) else (plain or ["not compatible"])[0].strip()
    except Exception as error:
        found[name] = (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
print("\\n" + json.dumps(found))
"""


def unavailable_operators(*operators: str) -> dict[str, str]:
    """Return for each operator the reason why DeepSpeed cannot use it here, or an empty text.

    Missing operators are built first, which takes minutes, once.
    """
    if importlib.util.find_spec("deepspeed") is None:
        return dict.fromkeys(operators, "not installed (pip install --no-build-isolation deepspeed)")
    if reason := explain_build_lock():
        return dict.fromkeys(operators, reason)
    done = subprocess.run(
        [sys.executable, "-c", _BUILD_PROGRAM, *operators],
        env={**os.environ, **build_tool_environment()},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return dict.fromkeys(operators, f"DeepSpeed cannot be imported: {last}")
    found: dict[str, str] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def explain_build_lock() -> str:
    """Return a text with the lock files in torch's cache of extensions; empty if there is none.

    A build that was killed leaves its lock behind. Every later build or load of the extension waits for the file to
    disappear, without a time limit.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    names = ", ".join(map(str, locks))
    return f"another build holds {names}; wait for it, or delete the file if none runs" if locks else ""


def build_tool_environment() -> dict[str, str]:
    """Return variables for DeepSpeed: PATH with the folder of this Python first, which may contain ninja, and a filter
    for the FutureWarning that DeepSpeed's use of deprecated torch functions causes at every step."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {"PATH": path, "PYTHONWARNINGS": "ignore::FutureWarning"}


def deepspeed_engine_config(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a configuration of windlass to the entry of `TrainingTask.configs` for the same training in DeepSpeed."""
    zero = dict(config["zero_optimization"])
    offloads = "offload_optimizer" in zero
    params = {"weight_decay": 0.01, **config["optimizer"]["params"]} | ({} if offloads else {"torch_adam": True})
    theirs = {**config, "optimizer": {"type": config["optimizer"]["type"], "params": params}}
    theirs["zero_optimization"] = {**zero, "overlap_comm": False}
    return {"engine": "deepspeed", "config": theirs}
