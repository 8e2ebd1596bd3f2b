"""Command `ds_report` on windlass: prints the native operators and the environment in DeepSpeed's format."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.text import print_escaped
from windlass.observe.environment import backend_support, costly_settings, gpu_topology, hardware_facts, version_facts
from windlass.observe.environment.try_fact import UNKNOWN, is_unknown, output_of, try_fact

_RULE = "-" * 50
_NAME_WIDTH = 24
_GB = 1 << 30


@dataclass(frozen=True)
class NativeOperator:
    """Operator under DeepSpeed's name, and the native module that implements it in windlass.

    Attributes:
        fallback: implementation that is used if the module is missing.
    """

    name: str
    module: str
    fallback: str


NATIVE_OPERATORS = (
    NativeOperator("cpu_adam", "windlass.kernels._optimizers", "PyTorch's own operations"),
    NativeOperator("cpu_adagrad", "windlass.kernels._optimizers", "PyTorch's own operations"),
    NativeOperator("cpu_lion", "windlass.kernels._optimizers", "PyTorch's own operations"),
    NativeOperator("cpu_lamb", "windlass.kernels._optimizers", "PyTorch's own operations"),
    NativeOperator("cpu_sgd", "windlass.kernels._optimizers", "PyTorch's own operations"),
    NativeOperator("async_io", "windlass.kernels._disk", "threads of Python"),
    NativeOperator("fingerprint", "windlass.kernels._hashes", "PyTorch's own operations"),
)


@exit_quietly_on_broken_pipe()
def ds_report(argv: Sequence[str] | None = None) -> int:
    """Print the report. Return the exit code, 0.

    Args:
        argv: `--hide_operator_status` and `--hide_errors_and_warnings`; None: the arguments of the command line.
    """
    parser = argparse.ArgumentParser(
        "ds_report", description="Print the native operators and the environment of windlass."
    )
    parser.add_argument("--hide_operator_status", action="store_true", help="omit the table of operators")
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="omit the reasons for missing operators"
    )
    asked = parser.parse_args(argv)
    main(asked.hide_operator_status, asked.hide_errors_and_warnings)
    return 0


@exit_quietly_on_broken_pipe()
def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report. Same as `deepspeed.env_report.main`."""
    for line in report_lines(operators=not hide_operator_status, warnings=not hide_errors_and_warnings):
        print_escaped(line)


def cli_main() -> None:
    """Run the command and exit with its code. Same as `deepspeed.env_report.cli_main`."""
    sys.exit(ds_report())


def report_lines(*, operators: bool = True, warnings: bool = True) -> Iterator[str]:
    """Yield the lines of the report.

    Args:
        operators: include the table of operators.
        warnings: include the reason why an operator is missing, and the settings that reduce speed.
    """
    if operators:
        yield from _operator_lines(warnings)
    yield _RULE
    yield "general environment of windlass:"
    for name, value in _general_facts():
        yield f"{name} {'.' * max(2, 33 - len(name))} {value}"
    if warnings:
        found = try_fact(costly_settings.find_costly_settings)
        if is_unknown(found):
            yield f"[WARNING] settings: {_format_fact(found)}"
        for one in found if isinstance(found, list) else ():
            yield f"[WARNING] {one['name']} = {one['value']}: {one['costs']}; instead: {one['instead']}"


def _operator_lines(warnings: bool) -> Iterator[str]:
    yield from (_RULE, "native operators of windlass", _RULE)
    yield "They are built when windlass is installed, never at run time. A missing operator has"
    yield "another implementation, so each is compatible with every machine."
    yield from (_RULE, _operator_row("op name", "installed", "compatible"), _RULE)
    for operator in NATIVE_OPERATORS:
        why = _import_problem(operator.module)
        if why and warnings:
            yield f"[WARNING] {operator.name}: {operator.fallback} are used instead, because {why}"
        yield _operator_row(operator.name, "[NO]" if why else "[YES]", "[OKAY]")


def _operator_row(name: str, installed: str, compatible: str) -> str:
    return f"{name} {'.' * (_NAME_WIDTH - 1 - len(name))} {installed} {'.' * (11 - len(installed))} {compatible}"


def _import_problem(module: str) -> str:
    """Return the reason why the native module cannot be used; empty if it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return "native code was not built when windlass was installed; install a C++20 compiler and reinstall windlass"
    except ImportError as error:
        return f"the native module does not load: {error}; reinstall windlass"
    return ""


def _general_facts() -> Iterator[tuple[str, str]]:
    torch = try_fact(version_facts.torch_facts)
    if is_unknown(torch):
        yield "torch version", f"unknown ({torch[UNKNOWN]})"
    else:
        yield "torch install path", f"['{torch['path']}']"
        yield "torch version", torch["version"]
        yield "torch cuda version", str(torch["cuda"])
        yield "torch hip version", str(torch["hip"])
    itself = version_facts.windlass_facts()
    yield "windlass install path", f"['{itself['path']}']"
    yield "windlass info", itself["version"]
    yield (
        "deepspeed info",
        version_facts.installed_version("deepspeed") or "not installed, and no stand-in is on PYTHONPATH",
    )
    yield "nvcc version", _format_fact(try_fact(_nvcc_version))
    yield "nvidia driver", _format_fact(try_fact(hardware_facts.nvidia_driver_version))
    devices = try_fact(hardware_facts.gpu_devices)
    names = devices if is_unknown(devices) else ", ".join(gpu["name"] for gpu in devices) or None
    yield "devices", _format_fact(names)
    topology = try_fact(gpu_topology.query_topology)
    yield "nvlink", _format_fact(topology if topology is None or is_unknown(topology) else topology["nvlink"])
    there = try_fact(backend_support.backend_availability)
    usable = there if is_unknown(there) else ", ".join(name for name, one in there.items() if one["available"])
    yield "back ends", _format_fact(usable)
    shared = try_fact(hardware_facts.shared_memory_facts)
    size = shared if is_unknown(shared) else f"{shared['total_bytes'] / _GB:.2f} GB"
    yield "shared memory (/dev/shm) size", _format_fact(size)


def _format_fact(value: str | dict[str, str] | None) -> str:
    if isinstance(value, dict):
        return f"unknown ({value[UNKNOWN]})"
    return value if value is not None else "not there"


def _nvcc_version() -> str | None:
    if shutil.which("nvcc") is None:
        return None
    words = output_of("nvcc", "--version").replace(",", " ").split()
    return words[words.index("release") + 1]
