"""Tests of `windlass env` and `ds_report`: the JSON schema, missing parts, and warnings."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from windlass.cli.environment import collect_facts as facts_module
from windlass.cli.environment.collect_facts import FACTS_FORMAT, collect_facts
from windlass.cli.environment.format_facts import format_facts
from windlass.cli.main import main
from windlass.compat.ds_report import NATIVE_OPERATORS, cli_main, ds_report
from windlass.observe.environment import backend_support, costly_settings, network_facts
from windlass.observe.environment.try_fact import is_unknown, output_of, try_fact

SCHEMA = {
    "format": int,
    "windlass": {"version", "path"},
    "python": {"version", "implementation", "executable"},
    "system": str,
    "torch": {"version", "path", "threads", "distributed", "cuda", "hip", "cudnn"},
    "packages": dict,
    "cpu": {"name", "cores", "usable"},
    "memory": {"total_bytes"},
    "devices": list,
    "driver": (str, type(None)),
    "topology": (dict, type(None)),
    "network": list,
    "infiniband": list,
    "kernels": {"path", "native", "why", "paths", "rules"},
    "backends": {"gloo", "nccl", "mpi", "ucc", "shm"},
    "collectives": dict,
    "operators": dict,
    "disk": {"engine", "rates"},
    "shared_memory": {"path", "total_bytes", "free_bytes"},
    "limits": {"open_files", "locked_bytes", "processes"},
    "variables": dict,
    "settings": list,
}
"""Keys of the JSON report. A change of a key has to change `FACTS_FORMAT` and docs/environment.md too."""


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_json_has_the_documented_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert call("env", "--json", "--disk", str(tmp_path)) == 0
    facts = json.loads(capsys.readouterr().out)
    assert list(facts) == list(SCHEMA) and facts["format"] == FACTS_FORMAT == 1
    for name, shape in SCHEMA.items():
        if isinstance(shape, set):
            assert set(facts[name]) == shape, name
        else:
            assert isinstance(facts[name], shape), name
    assert not [name for name, value in facts.items() if is_unknown(value)] or sys.platform != "linux"
    for table in (facts["collectives"], facts["operators"]):
        assert all(set(row) == set(backend_support.BACKEND_NAMES) for row in table.values())
    rates = facts["disk"]["rates"]
    assert rates["folder"] == str(tmp_path) and rates["measured_bytes"] == 128 << 20
    assert rates["read_bytes_per_second"] > 1e6 and rates["write_bytes_per_second"] > 1e6
    assert list(tmp_path.iterdir()) == []


def test_json_and_text_have_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("env") == 0
    printed = capsys.readouterr().out
    for line in format_facts(collect_facts()):
        if "GiB free" not in line:  # free memory changes from one moment to the next
            assert line in printed.splitlines()


@pytest.mark.parametrize("missing", ["folder", "file"])
def test_unmeasurable_disk_is_reported_and_nothing_is_created(missing: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if missing == "file":
        place.write_text("")
    disk = collect_facts(place)["disk"]
    assert disk["rates"]["unknown"].startswith("StorageError") and str(place) in disk["rates"]["unknown"]
    assert "io_uring" in disk["engine"] or "threads" in disk["engine"] or "python" in disk["engine"]
    assert place.exists() == (missing == "file")


def test_failing_driver_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'the driver does not answer' >&2\nexit 9\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    facts = collect_facts()
    for name in ("driver", "topology"):
        assert "exit code 9: the driver does not answer" in facts[name]["unknown"]
    text = "\n".join(format_facts(facts))
    assert "topology     unknown (RuntimeError: nvidia-smi topo -m ended with exit code 9" in text
    monkeypatch.setattr("windlass.observe.environment.try_fact._COMMAND_TIMEOUT_S", 0.2)
    tool.write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(OSError, match=r"nvidia-smi did not answer within"):
        output_of("nvidia-smi")


def test_unknown_facts_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no such thing here")

    monkeypatch.setattr("windlass.cli.environment.collect_facts.try_fact", lambda question: try_fact(fail))
    facts = collect_facts()
    assert "\n".join(format_facts(facts)).count("unknown (OSError: no such thing here)") == 19


@pytest.mark.parametrize("name", [item.name for item in costly_settings.COSTLY_SETTINGS])
def test_harmful_setting_is_reported_with_its_cost(name: str) -> None:
    harmful = {
        "NCCL_NET": "Socket",
        "NCCL_DEBUG": "info",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "WINDLASS_KERNELS": "reference",
    }
    harmful |= {
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_P2P_LEVEL": "LOC",
        "NCCL_NET_GDR_LEVEL": "0",
    }
    harmful |= {"WINDLASS_TRANSPORT": "gloo", "WINDLASS_DISK_ENGINE": "python", "WINDLASS_EMULATE_DEVICE": "1G"}
    harmful |= dict.fromkeys(("NCCL_NVLS_ENABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NVIDIA_TF32_OVERRIDE"), "0")
    value = harmful.get(name, "1")
    (result,) = costly_settings.find_costly_settings({name: value}, Path("/nowhere"))
    assert (result["name"], result["value"], result["source"]) == (name, value, "environment")
    assert result["costs"] and result["instead"]
    assert costly_settings.find_costly_settings({name: ""}, Path("/nowhere")) == []


@pytest.mark.parametrize(
    "harmless",
    [
        {"NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "CUDA_LAUNCH_BLOCKING": "0"},
        {"NCCL_P2P_LEVEL": "NVL", "NCCL_NET": "IB", "NCCL_DEBUG": "WARN", "NCCL_NVLS_ENABLE": "1"},
        {"NCCL_SOCKET_IFNAME": "eth0", "WINDLASS_TRANSPORT": "shm", "TORCH_DISTRIBUTED_DEBUG": "INFO"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "OMP_NUM_THREADS": "2", "WINDLASS_KERNELS": "AVX2"},
    ],
)
def test_harmless_settings_are_not_reported(harmless: dict[str, str]) -> None:
    assert costly_settings.find_costly_settings(harmless, Path("/nowhere"), cores=2) == []


def test_nccl_conf_is_read_and_overridden_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("# of the cluster\nNCCL_IB_DISABLE=1 # why?\n\nNCCL_P2P_DISABLE = 1\n")
    results = {
        item["name"]: item["source"] for item in costly_settings.find_costly_settings({"NCCL_P2P_DISABLE": "0"}, file)
    }
    assert results == {"NCCL_IB_DISABLE": str(file)}
    assert [
        item["name"]
        for item in costly_settings.find_costly_settings({"NCCL_CONF_FILE": str(file), "NCCL_P2P_DISABLE": "0"})
    ] == ["NCCL_IB_DISABLE"]


def test_excess_threads_and_low_limits_are_reported() -> None:
    (results,) = costly_settings.find_costly_settings({"OMP_NUM_THREADS": "64"}, Path("/nowhere"), cores=2)
    assert "64 threads a rank share 2 cores" in results["costs"]
    wide = costly_settings.MachineLimits(8, True, None, None, 64 << 30)
    narrow = costly_settings.MachineLimits(8, True, 65536, 256, 64 << 20)
    assert costly_settings.find_low_limits(wide) == []
    assert [item["name"] for item in costly_settings.find_low_limits(narrow)] == [
        "locked memory",
        "/dev/shm",
        "open files",
    ]
    assert costly_settings.find_low_limits(costly_settings.MachineLimits(0, False, 65536, 1024, 64 << 20)) == []


def test_network_interfaces_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, files in {
        "eth0": {"operstate": "up\n", "speed": "25000\n", "mtu": "9000\n", "device": None},
        "ib0": {"operstate": "down\n", "mtu": "2044\n", "device": None},
        "lo": {"operstate": "unknown\n", "speed": "-1\n", "mtu": "65536\n"},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).mkdir() if text is None else (tmp_path / name / file).write_text(text)
    (tmp_path / "bonding_masters").write_text("bond0")
    eth, ib, lo = network_facts.network_interfaces(tmp_path)
    assert eth == {"name": "eth0", "state": "up", "megabits_per_second": 25000, "mtu": 9000, "virtual": False}
    assert ib["megabits_per_second"] is None and not ib["virtual"]
    assert lo["megabits_per_second"] is None and lo["virtual"]
    assert network_facts.network_interfaces(tmp_path / "nowhere") == []


def test_infiniband_ports_are_read(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}.items():
        (port / name).write_text(text + "\n")
    (result,) = network_facts.infiniband_devices(tmp_path)
    ports = [{"port": 1, "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}]
    assert result == {"name": "mlx5_0", "ports": ports}
    assert network_facts.infiniband_devices(tmp_path / "nowhere") == []


def test_ds_report_has_the_table_and_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_report([]) == 0
    printed = capsys.readouterr().out.splitlines()
    at = next(n for n, line in enumerate(printed) if line == "op name ................ installed .. compatible")
    rows = [line.split() for line in printed[at + 2 :] if not line.startswith("[WARNING]")][: len(NATIVE_OPERATORS)]
    assert [row[0] for row in rows] == [operator.name for operator in NATIVE_OPERATORS]
    assert {row[2] for row in rows} <= {"[YES]", "[NO]"} and {row[4] for row in rows} == {"[OKAY]"}
    names = [line.split(" ..")[0] for line in printed]
    assert {"torch version", "torch install path", "deepspeed info", "shared memory (/dev/shm) size"} <= set(names)


def test_ds_report_honors_its_hide_flags(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "windlass.kernels._disk", None)  # as if the extension had not been built
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert ds_report([]) == 0
    full = capsys.readouterr().out
    assert (
        "[WARNING] async_io: " in full
        and "because native code was not built when windlass was installed" in full
        and "[WARNING] NCCL_IB_DISABLE = 1: hosts communicate" in full
    )
    assert "async_io ............... [NO] ....... [OKAY]" in full
    assert ds_report(["--hide_errors_and_warnings"]) == 0
    quiet = capsys.readouterr().out
    assert "WARNING" not in quiet and "async_io ............... [NO]" in quiet
    assert ds_report(["--hide_operator_status"]) == 0
    short = capsys.readouterr().out
    assert "op name" not in short and "torch version" in short
    with pytest.raises(SystemExit) as ended:
        ds_report(["--no-such-flag"])
    assert ended.value.code == 2


def test_command_parses_its_arguments_and_returns_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ds_report", "--hide_operator_status"])
    with pytest.raises(SystemExit) as ended:
        cli_main()
    assert ended.value.code == 0 and "op name" not in capsys.readouterr().out


def test_folder_in_memory_is_not_reported_as_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = collect_facts()
    facts["disk"]["rates"] = {
        "folder": "/dev/shm", "file_system": "tmpfs", "memory": True, "free_bytes": 1 << 30, "measured_bytes": 1 << 27,
        "read_bytes_per_second": 10**9, "write_bytes_per_second": 2 * 10**9,
    }  # fmt: skip
    text = "\n".join(format_facts(facts))
    assert "this is memory, not a disk): reads 1.00 GB/s, writes 2.00 GB/s (128 MiB each way)" in text
    assert facts_module.disk_engine().split()[0] in text
