"""Tests of the folder with which `import deepspeed` imports windlass (PYTHONPATH or an import), and its metadata."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from windlass.compat.stand_in_path import STAND_IN_FOLDER, stand_in_environment
from windlass.compat.stand_in_version import VERSION

ROOT = Path(__file__).parents[2]
_ASK = """
import importlib.metadata as metadata, importlib.util, json, subprocess, sys
{first}
import deepspeed
show = "import deepspeed; print(deepspeed.__version__)"
child = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True)
print(json.dumps({{
    "version": deepspeed.__version__,
    "spec": importlib.util.find_spec("deepspeed").origin,
    "metadata": [metadata.version("deepspeed"), metadata.metadata("deepspeed")["Name"]],
    "packages": metadata.packages_distributions().get("deepspeed"), "child": child.stdout.strip(),
    "engine": deepspeed.DeepSpeedEngine.__module__, "child_said": child.stderr,
}}))
"""


def _run(text: str, *, path: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    ours = ("WINDLASS_STANDS_IN", "WINDLASS_LOG_LEVEL", "RANK")  # ranks other than 0 log nothing
    inherited = {key: value for key, value in os.environ.items() if key not in ours}
    variables = {**inherited, "PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), **env}
    return subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True, timeout=120)


def require_stand_in(done: subprocess.CompletedProcess[str]) -> None:
    """Check that import, `find_spec` and package metadata find windlass, also in a child process."""
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["version"] == results["child"] == VERSION
    assert results["metadata"] == [VERSION, "deepspeed"] and results["packages"] == ["deepspeed"]
    assert Path(results["spec"]).is_relative_to(STAND_IN_FOLDER)
    assert results["engine"] == "windlass.compat.deepspeed_engine"


def test_one_import_makes_windlass_deepspeed_in_child_processes_too() -> None:
    require_stand_in(_run(_ASK.format(first="import windlass.compat.deepspeed"), path=[]))


def test_the_command_prints_the_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "windlass.compat"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{STAND_IN_FOLDER}\n")
    wrong = subprocess.run([sys.executable, "-m", "windlass.compat", "x"], capture_output=True, text=True, cwd=ROOT)
    assert wrong.returncode == 2 and "takes no arguments" in wrong.stderr


def test_metadata_is_an_egg_info_folder() -> None:
    """Metadata uses `*.egg-info`, since wheel builders leave out `*.dist-info`. Python reads both."""
    assert not list(STAND_IN_FOLDER.glob("*.dist-info"))
    (folder,) = STAND_IN_FOLDER.glob("*.egg-info")
    assert folder.name == f"deepspeed-{VERSION}.egg-info"
    assert f"Version: {VERSION}\n" in (folder / "PKG-INFO").read_text()
    assert "windlass" in (folder / "PKG-INFO").read_text()


def test_stand_in_overrides_installed_deepspeed_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = 'real'\n")
    show = "import deepspeed; print(deepspeed.__version__)"
    assert _run(show, path=[str(tmp_path)]).stdout == "real\n"
    done = _run(_ASK.format(first=""), path=[str(STAND_IN_FOLDER), str(tmp_path)])
    require_stand_in(done)
    assert done.stderr.count("stands in for the DeepSpeed that is installed") == 1
    assert json.loads(done.stdout)["child_said"] == ""


def test_activation_after_import_of_deepspeed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    done = _run("import deepspeed, windlass.compat.deepspeed", path=[str(tmp_path)])
    assert done.returncode and "deepspeed was imported already" in done.stderr


def test_the_folder_is_put_first_once() -> None:
    once = stand_in_environment({"PYTHONPATH": "/a"})["PYTHONPATH"]
    assert once.split(os.pathsep) == [str(STAND_IN_FOLDER), "/a"]
    assert stand_in_environment({"PYTHONPATH": once})["PYTHONPATH"] == once


_PROGRAMS = """
import runpy, sys
for program in ("deepspeed.utils.zero_to_fp32", "deepspeed.launcher.runner", "deepspeed.checkpoint.ds_to_universal"):
    sys.argv = [program, "--help"]
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        print("ended with", ended.code or 0)
"""


def test_programs_of_the_stand_in_run() -> None:
    """All programs run in one process, which imports torch once."""
    done = _run(_PROGRAMS, path=[str(STAND_IN_FOLDER)])
    assert done.returncode == 0, done.stderr
    *parts, rest = done.stdout.split("ended with 0\n")
    assert len(parts) == 3 and rest == "" and all("usage" in part.lower() for part in parts), done.stdout + done.stderr


_LIVE_NAMES = """
import importlib, windlass.compat.deepspeed
from windlass.parallel.activation_checkpoint_api import current_options
names = importlib.import_module("deepspeed.checkpointing")
assert not names.deepspeed_checkpointing_enabled and names.num_layers is None and names.mpu is None
try:
    names.configure(None, contiguous_checkpointing=True)
except AssertionError as error:
    assert "number of layers" in str(error)
else:
    raise SystemExit("it took contiguous checkpointing without a number of layers")
assert not names.is_configured()
names.configure(None, contiguous_checkpointing=True, num_checkpoints=3)
assert (names.CONTIGUOUS_CHECKPOINTING, names.num_layers) == (True, 3)
names.PROFILE_TIME, names.CONTIGUOUS_CHECKPOINTING, names.mpu = True, False, None
assert current_options().profile and not current_options().contiguous_memory_optimization
assert names.PROFILE_TIME and names.deepspeed_checkpointing_enabled
names.deepspeed_checkpointing_enabled = False
assert not names.is_configured() and not names.PROFILE_TIME
"""


def test_activation_options_have_the_names_of_deepspeed_globals() -> None:
    """See [Note: live names]: reading an option returns the configured value, and setting it configures."""
    done = _run(_LIVE_NAMES, path=[])
    assert done.returncode == 0, done.stderr
