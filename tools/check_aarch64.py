"""Compile every native source for 64-bit ARM on another machine, with the compiler of the package `ziglang`.

python tools/check_aarch64.py                # all sources; `pip install ziglang` first
python tools/check_aarch64.py low_bit_set    # some of them

The objects are deleted and not linked: they only prove that the sources compile and that the assembler accepts the
instructions. The exit code is 1 if a source does not compile, and 2 if the compiler is missing.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parents[1] / "windlass" / "kernels" / "native"
_TARGET = "aarch64-linux-gnu.2.28"
# Sources that are compiled once for each instruction set, and the only set on ARM.
_SETS = {"instruction_set": "kBaseline", "inference_set": "kInferenceBaseline"}
_LOW_BIT = ("low_bit_set", "low_bit_byte_rows", "low_bit_few_bits", "low_bit_more_bits")
_SETS |= dict.fromkeys(_LOW_BIT, "kLowBitBaseline")


def main(names: list[str]) -> int:
    """Compile the sources of these names, by default all, and print one line for each."""
    if importlib.util.find_spec("ziglang") is None:
        print("there is no compiler for 64-bit ARM; pip install ziglang")
        return 2
    failed = 0
    for source in sorted(_SOURCES.glob("*.cpp")):
        if names and source.stem not in names:
            continue
        problems = _compile(source)
        print(f"{source.name}: {'compiles' if problems is None else 'FAILED'}", flush=True)
        if problems is not None:
            print(problems)
            failed += 1
    return 1 if failed else 0


def _compile(source: Path) -> str | None:
    """Return the compiler's messages if the source does not compile, else None."""
    command = [sys.executable, "-m", "ziglang", "c++", "-target", _TARGET, "-std=gnu++20", "-O1", "-fPIC"]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-function", "-ffp-contract=off"]
    if source.stem in _SETS:
        command.append(f"-DWINDLASS_SET={_SETS[source.stem]}")
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--include_dir"], capture_output=True, text=True, check=True
    ).stdout.strip()
    command += ["-isystem", nanobind, "-isystem", sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "-c", str(source), "-o", f"{folder}/object.o"], capture_output=True, text=True, check=False
        )
    return (done.stderr or f"the compiler ended with {done.returncode}") if done.returncode else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
