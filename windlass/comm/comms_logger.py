"""`comms_logger`: number, size and speed of communication calls, by operation and message size."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import torch.distributed as dist

from windlass.base.errors import ConfigError
from windlass.base.log import logger
from windlass.comm import traffic
from windlass.comm.collective_bandwidth import calc_bw_log, convert_size, trimmed_mean
from windlass.config.comm_section import CommsLoggerConfig as Settings


def analyze_stragglers(records: dict[str, dict[int, list[Any]]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return each operation's latency without waiting, and the time this rank waited, in ms. Collective.

    The last rank to arrive at an operation measures only the latency; the others measure the latency and their wait.
    Operations are matched by name, size and order. If ranks recorded an operation different numbers of times (a send,
    or an operation of a subgroup), only ranks with the same count as this one are compared.

    Args:
        records: Records of this rank, as in `CommsLogger.comms_dict`.
    """
    local = {(name, size): record[1] for name, sizes in records.items() for size, record in sizes.items()}
    everyone = [local]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, local)
    late: dict[str, dict[int, dict[str, Any]]] = {}
    for (name, size), latencies in sorted(local.items()):
        comparable = [other[name, size] for other in everyone if len(other.get((name, size), ())) == len(latencies)]
        least = [min(times) for times in zip(*comparable, strict=True)]
        waited = [own - best for own, best in zip(latencies, least, strict=True)]
        late.setdefault(name, {})[size] = {
            "count": len(latencies),
            "total_comm_lat_ms": sum(least),
            "total_straggler_ms": sum(waited),
            "avg_comm_lat_ms": trimmed_mean(least),
            "avg_straggler_ms": trimmed_mean(waited),
            "msg_size_bytes": size,
            "msg_size_str": convert_size(size),
        }
    return late


Records = dict[str, dict[int, list[Any]]]


class CommsLogger:
    """Records of this rank's communication calls, and the settings that select calls.

    Attributes:
        enabled: Record calls.
        prof_all: Record every operation; else only those in `prof_ops` and calls with `prof=True`.
        prof_ops: Names of operations, or the `log_name` of a call.
        verbose: Log each call as it ends.
        debug: Distinguish calls by their calling function.
        comms_dict: `{name: {bytes: [count, [ms], [algorithmic Gbit/s], [bus Gbit/s]]}}`.
        engine_traffic: Traffic of windlass' own engines while enabled: `{operation: {bytes: count}}`. Their collectives
            overlap with computation, so they have no latency of their own.
    """

    def __init__(self) -> None:
        defaults = Settings()
        self.prof_all, self.prof_ops = defaults.prof_all, list(defaults.prof_ops)
        self.verbose, self.debug = defaults.verbose, defaults.debug
        self.comms_dict: Records = {}
        self.engine_traffic: dict[str, Counter[int]] = {}
        self._lock = threading.Lock()
        self._enabled = defaults.enabled

    @property
    def enabled(self) -> bool:
        return self._enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._enabled = bool(value)
        traffic.set_traffic_observer(self._record_engine_traffic if self._enabled else None)

    def configure(self, comms_config: Any) -> None:
        """Apply the section `comms_logger`.

        Args:
            comms_config: A full configuration (a dict, or an object with `comms_logger`), or a `CommsLoggerConfig`.
                Without the section, nothing changes.

        Raises:
            ConfigError: the section is invalid.
        """
        settings = _read_section(comms_config)
        if settings is None:
            return
        self.prof_all, self.prof_ops = settings.prof_all, list(settings.prof_ops)
        self.verbose, self.debug = settings.verbose, settings.debug
        self.enabled = settings.enabled

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        gone = set(op_name_list)
        self.prof_ops = [name for name in self.prof_ops if name not in gone]

    def should_record(self, name: str, prof: bool) -> bool:
        """Return True if a call under this name is recorded."""
        return self._enabled and (prof or self.prof_all or name in self.prof_ops)

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int, ranks: int | None = None) -> None:
        """Record one operation.

        Args:
            raw_name: The operation, which determines how its bandwidth is computed.
            record_name: Name of the record in `comms_dict`.
            latency: Duration in milliseconds.
            msg_size: Bytes of this rank's message; for a reduce-scatter, of its input.
            ranks: Number of ranks of the group; None: the world.
        """
        ranks = ranks or (dist.get_world_size() if dist.is_initialized() else 1)
        size = msg_size // ranks if raw_name.startswith("reduce_scatter") else msg_size
        algorithmic, bus = calc_bw_log(raw_name, size, latency, ranks)
        with self._lock:  # asynchronous calls end on other threads
            record = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
            record[0] += 1
            for values, value in zip(record[1:], (latency, algorithmic, bus), strict=True):
                values.append(value)
        if self.verbose:
            logger.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                record_name, latency, convert_size(msg_size), algorithmic, bus,
            )  # fmt: skip

    def get_raw_data(self) -> Records:
        return dict(self.comms_dict)

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        with self._lock:
            self.comms_dict.clear()
            self.engine_traffic.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(record[0] for sizes in self.comms_dict.values() for record in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return the summary of `log_all` by message size, or None if nothing is recorded under `operation_name`."""
        with self._lock:
            sizes = self.comms_dict.get(operation_name)
            return (
                None
                if sizes is None
                else {size: _summarize_record(size, record) for size, record in sorted(sizes.items())}
            )

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the records of this rank, return them, or both.

        Args:
            print_log: Print a table.
            show_straggler: Include the time that this rank waited for later ranks: each latency minus the minimum over
                ranks for the same operation. Collective: all ranks must set it.
            return_dict: Return `{"summary", "straggler_analysis", "engine", "metadata"}`.
        """
        started = dist.is_initialized()
        names = list(self.comms_dict)
        summary = {name: self.get_operation_summary(name) or {} for name in names}
        with self._lock:
            records = {name: dict(sizes) for name, sizes in self.comms_dict.items()}
            engine = {name: dict(sizes) for name, sizes in self.engine_traffic.items()}
        late = analyze_stragglers(records) if show_straggler else None
        if print_log:
            for line in _format_table(summary, _COLUMNS):
                print(line)
            for name, sizes in engine.items():
                for size, count in sorted(sizes.items()):
                    print(f"{'engine ' + name: <20}{convert_size(size): <20}{count: <20}")
            if late is not None:
                print("Breakdown with straggler effect")
                for line in _format_table(late, _STRAGGLER_COLUMNS):
                    print(line)
        if not return_dict:
            return None
        place = (
            {"world_size": dist.get_world_size(), "rank": dist.get_rank()} if started else {"world_size": 1, "rank": 0}
        )
        return {
            "summary": summary,
            "straggler_analysis": late,
            "engine": engine,
            "metadata": {**place, "timestamp": datetime.now().isoformat()},
        }

    def _record_engine_traffic(self, operation: str, moved: int) -> None:
        with self._lock:
            self.engine_traffic.setdefault(operation, Counter())[moved] += 1


_COLUMNS = {
    "Total Latency(ms)": "total_latency_ms",
    "Avg Latency(ms)": "avg_latency_ms",
    "tput_avg (Gbps)": "tput_avg_gbps",
    "busbw_avg (Gbps)": "busbw_avg_gbps",
}
_STRAGGLER_COLUMNS = {
    "Total comm lat(ms)": "total_comm_lat_ms",
    "Total straggler(ms)": "total_straggler_ms",
    "Avg comm lat(ms)": "avg_comm_lat_ms",
    "Avg straggler(ms)": "avg_straggler_ms",
}


def _summarize_record(size: int, record: list[Any]) -> dict[str, Any]:
    count, latencies, algorithmic, bus = record
    return {
        "count": count,
        "total_latency_ms": sum(latencies),
        "avg_latency_ms": trimmed_mean(latencies),
        "tput_avg_gbps": trimmed_mean(algorithmic),
        "busbw_avg_gbps": trimmed_mean(bus),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _format_table(summary: Mapping[str, Mapping[int, Mapping[str, Any]]], columns: Mapping[str, str]) -> Iterable[str]:
    yield "".join(f"{title: <20}" for title in ("Comm. Op", "Message Size", "Count", *columns))
    for name, sizes in summary.items():
        yield name
        for figures in sizes.values():
            values = "".join(f"{figures[key]: <20.2f}" for key in columns.values())
            yield f"{'': <20}{figures['msg_size_str']: <20}{figures['count']: <20}{values}"


def _read_section(config_or_section: Any) -> Settings | None:
    """Return the section `comms_logger` of a configuration, or the argument if it is that section.

    None if the configuration lacks the section.
    """
    if isinstance(config_or_section, Settings):
        return config_or_section
    inner = getattr(config_or_section, "comms_config", config_or_section)  # a DeepSpeedConfig has the section there
    section = inner.get("comms_logger") if isinstance(inner, Mapping) else getattr(inner, "comms_logger", None)
    if section is None or isinstance(section, Settings):
        return section
    if hasattr(section, "prof_ops"):
        section = {name: getattr(section, name) for name in Settings.model_fields}
    try:
        return Settings.model_validate(section)
    except ValueError as error:
        raise ConfigError(f"comms_logger = {section!r} is not valid; correct the keys named here: {error}") from error


comms_logger = CommsLogger()
