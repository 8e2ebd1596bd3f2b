"""Formatting of the report of `windlass env` as text: lines for each fact about machine and installation, then settings
that reduce speed, and the table of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from windlass.observe.environment.backend_support import BACKEND_NAMES, TENSOR_DEVICES
from windlass.observe.environment.gpu_topology import LINK_CLASSES
from windlass.observe.environment.try_fact import UNKNOWN, is_unknown

_GIB = 1 << 30
_NVLINK_TEXTS = {
    "none": "no NVLink",
    "some pairs": "NVLink between some pairs only",
    "all pairs": "NVLink between all pairs",
    "switch": "NVLink between all pairs, through NVSwitch",
}


def format_facts(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report on the facts that `collect_facts` returned."""
    for name, key, formatter in _FACT_ROWS:
        value = facts[key]
        lines = [_format_unknown(value)] if is_unknown(value) else formatter(value)
        yield from (f"{name if number == 0 else '':<13}{line}" for number, line in enumerate(lines))
    yield ""
    yield "settings that reduce speed:" if facts["settings"] else "settings that reduce speed: none of the known ones"
    if is_unknown(facts["settings"]):
        yield f"  {_format_unknown(facts['settings'])}"
    else:
        for one in facts["settings"]:
            yield f"  {one['name']} = {one['value']} ({one['source']})"
            yield f"      costs: {one['costs']}; instead: {one['instead']}"
    yield ""
    yield "native support of each backend:"
    yield from _backend_table(facts)


def format_support_table(available: dict[str, dict[str, Any]], table: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the lines of `windlass env --backends`: one for each operation, with a column for each backend and device.

    Args:
        available: result of `backend_availability`.
        table: result of `support_by_device`.
    """
    columns = list(next(iter(table.values())))
    yield _table_row("", columns)
    for row, cells in table.items():
        yield _table_row(row, [cells[column] for column in columns])
    yield ""
    yield (
        "native: by the back end; staged: through host memory; composed: by windlass.compat.collectives, from "
        "operations that it has; -: not at all"
    )
    for name, facts in available.items():
        state = facts["version"] or "available"
        yield f"{name:<6}{state if facts['available'] else 'not available: ' + facts['why']}"


def _format_unknown(value: dict[str, str]) -> str:
    return f"unknown ({value[UNKNOWN]})"


def _backend_table(facts: dict[str, Any]) -> Iterator[str]:
    there = facts["backends"]
    yield _table_row("", BACKEND_NAMES)
    if not is_unknown(there):
        yield _table_row("available here", [_yes_or_no(there[name]["available"]) for name in BACKEND_NAMES])
    yield _table_row("tensors", [TENSOR_DEVICES[name] for name in BACKEND_NAMES])
    for row, have in (*facts["collectives"].items(), *facts["operators"].items()):
        yield _table_row(row, ["x" if have[name] else "-" for name in BACKEND_NAMES])
    yield (
        "  windlass.compat.collectives composes the collectives that a backend lacks, and LAND, LOR, LXOR, MINLOC, "
        "MAXLOC on all of them"
    )


def _table_row(name: str, values: Iterable[str]) -> str:
    return (f"  {name:<20}" + "".join(f"{value:<10}" for value in values)).rstrip()


def _format_python(value: dict[str, Any]) -> list[str]:
    return [f"{value['version']} ({value['implementation']}, {value['executable']})"]


def _format_torch(value: dict[str, Any]) -> list[str]:
    built = [f"{name} {value[name]}" for name in ("cuda", "hip", "cudnn") if value[name]] or ["no CUDA"]
    many, distributed = f"{value['threads']} threads", f"distributed {_yes_or_no(value['distributed'])}"
    return [", ".join([value["version"], *built, many, distributed])]


def _format_packages(value: dict[str, str | None]) -> list[str]:
    there = ", ".join(f"{name} {version}" for name, version in value.items() if version)
    absent = ", ".join(name for name, version in value.items() if not version)
    return [there, *([f"not installed: {absent}"] if absent else [])]


def _format_cpu(value: dict[str, Any]) -> list[str]:
    return [f"{value['name']}, {value['usable']} of {value['cores']} cores usable"]


def _format_devices(value: list[dict[str, Any]]) -> list[str]:
    return [
        f"{gpu['index']}: {gpu['name']}, {gpu['memory_bytes'] / _GIB:.0f} GiB, capability {gpu['capability']}, "
        f"{gpu['processors']} processors"
        for gpu in value
    ] or ["no GPU"]


def _format_topology(value: dict[str, Any] | None) -> list[str]:
    if value is None:
        return ["nvidia-smi is not installed"]
    pairs = ", ".join(f"{link} {count} ({_describe_link(link)})" for link, count in value["pairs"].items())
    lines = [_NVLINK_TEXTS[value["nvlink"]] + (f"; pairs of GPUs: {pairs}" if pairs else "")]
    everyone = list(value["links"])
    if len(everyone) > 1:
        lines.append("".join(f"{name:<6}" for name in ("", *everyone)))
        lines += ["".join(f"{cell:<6}" for cell in (name, *row.values())) for name, row in value["links"].items()]
    lines += [
        f"{gpu}: nearest network card {', '.join(near['cards'])} ({near['class']}: {_describe_link(near['class'])})"
        for gpu, near in value["nearest_cards"].items()
    ]
    return lines + [f"{gpu}: processors {cpus}" for gpu, cpus in value["cpus"].items()]


def _describe_link(link: str) -> str:
    return LINK_CLASSES["NV" if link.startswith("NV") else link].replace("#", link[2:])


def _format_network(value: list[dict[str, Any]]) -> list[str]:
    return [_format_interface(one) for one in value] or ["no interface"]


def _format_interface(one: dict[str, Any]) -> str:
    lines = [one["state"] or "state unknown", _format_rate(one["megabits_per_second"]), f"packets of {one['mtu']}"]
    return f"{one['name']}: {', '.join(lines + ['virtual'] * one['virtual'])}"


def _format_rate(megabits: int | None) -> str:
    return "rate not reported" if megabits is None else f"{megabits / 1000:g} Gbit/s"


def _format_infiniband(value: list[dict[str, Any]]) -> list[str]:
    return [
        f"{one['name']} port {port['port']}: {port['state']}, {port['rate']}, {port['link_layer']}"
        for one in value
        for port in one["ports"]
    ] or ["no device"]


def _format_kernels(value: dict[str, Any]) -> list[str]:
    first = f"{'native ' if value['native'] else ''}{value['path']} ({value['why']}) for {', '.join(value['rules'])}"
    return [first, f"can run here: {', '.join(value['paths'])}"]


def _format_backends(value: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name} {one['version'] or ''}".strip() + f": {'yes' if one['available'] else 'no, ' + one['why']}"
        for name, one in value.items()
    ]


def _format_disk(value: dict[str, Any]) -> list[str]:
    engine, rates = value["engine"], value["rates"]
    lines = [_format_unknown(engine) if is_unknown(engine) else engine]
    if rates is None:
        return [*lines, "rates: measure with --disk FOLDER"]
    if is_unknown(rates):
        return [*lines, f"rates: {_format_unknown(rates)}"]
    memory = "; this is memory, not a disk" if rates["memory"] else ""
    return [
        *lines,
        f"{rates['folder']} ({rates['file_system']}, {rates['free_bytes'] / _GIB:.1f} GiB free{memory}): reads "
        f"{rates['read_bytes_per_second'] / 1e9:.2f} GB/s, writes {rates['write_bytes_per_second'] / 1e9:.2f} GB/s "
        f"({rates['measured_bytes'] >> 20} MiB each way)",
    ]


def _format_shared_memory(value: dict[str, Any]) -> list[str]:
    return [f"{value['free_bytes'] / _GIB:.1f} of {value['total_bytes'] / _GIB:.1f} GiB free"]


def _format_limits(value: dict[str, int | None]) -> list[str]:
    return [", ".join(f"{name.replace('_', ' ')} {'unlimited' if n is None else n}" for name, n in value.items())]


def _format_variables(value: dict[str, str]) -> list[str]:
    return [f"{name}={text}" for name, text in value.items()] or ["none that affect a run"]


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


_FACT_ROWS: tuple[tuple[str, str, Callable[[Any], list[str]]], ...] = (
    ("windlass", "windlass", lambda value: [f"{value['version']} ({value['path']})"]),
    ("python", "python", _format_python),
    ("system", "system", lambda value: [value]),
    ("torch", "torch", _format_torch),
    ("packages", "packages", _format_packages),
    ("cpu", "cpu", _format_cpu),
    ("memory", "memory", lambda value: [f"{value['total_bytes'] / _GIB:.1f} GiB"]),
    ("devices", "devices", _format_devices),
    ("driver", "driver", lambda value: [value or "nvidia-smi is not installed"]),
    ("topology", "topology", _format_topology),
    ("network", "network", _format_network),
    ("infiniband", "infiniband", _format_infiniband),
    ("kernels", "kernels", _format_kernels),
    ("back ends", "backends", _format_backends),
    ("disk tier", "disk", _format_disk),
    ("/dev/shm", "shared_memory", _format_shared_memory),
    ("limits", "limits", _format_limits),
    ("variables", "variables", _format_variables),
)
