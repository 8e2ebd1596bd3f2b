"""Settings of this machine that slow training down or may let it hang: detection, and the cost of each.

NCCL's variables are described in its documentation (docs.nvidia.com/deeplearning/nccl: environment variables).
`windlass bench transport` measures the cost of the settings for P2P, shared memory and InfiniBand on a machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

NCCL_FILE = Path("/etc/nccl.conf")
_ENVIRONMENT = "environment"
_NEVER = ("0", "loc")
_GIB = 1 << 30


@dataclass(frozen=True)
class CostlySetting:
    """Environment variable, a predicate for its costly values, and their consequence."""

    name: str
    is_costly: Callable[[str], bool]
    consequence: str
    remedy: str = "unset it"


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "off", "no")


def _is_off(value: str) -> bool:
    return value.strip() == "0"


def _is_never(value: str) -> bool:
    return value.strip().lower() in _NEVER


def _is_set(value: str) -> bool:
    return bool(value.strip())


def _is_one(value: str) -> bool:
    return value.strip() == "1"


_THROUGH_HOST = "GPUs of a host no longer reach each other over NVLink or PCIe: every byte goes through host memory"
_BY_SOCKET = "hosts communicate by TCP sockets: no InfiniBand or RoCE, and the processor copies every byte"
COSTLY_SETTINGS = (
    CostlySetting(
        "CUDA_LAUNCH_BLOCKING",
        _is_on,
        "the host waits for each kernel: no compute, copy or collective overlaps another",
    ),
    CostlySetting("NCCL_P2P_DISABLE", _is_on, _THROUGH_HOST),
    CostlySetting("NCCL_P2P_LEVEL", _is_never, _THROUGH_HOST),
    CostlySetting(
        "NCCL_SHM_DISABLE",
        _is_on,
        "GPUs of a host that have no direct path send over the network stack instead of shared memory",
    ),
    CostlySetting("NCCL_IB_DISABLE", _is_on, _BY_SOCKET),
    CostlySetting("NCCL_NET", lambda value: value.strip().lower() == "socket", _BY_SOCKET),
    CostlySetting(
        "NCCL_NET_GDR_LEVEL", _is_never, "no GPUDirect RDMA: what goes to another host passes through host memory"
    ),
    CostlySetting(
        "NCCL_NVLS_ENABLE", _is_off, "NVSwitch does not reduce in the network: all-reduce moves more bytes over NVLink"
    ),
    CostlySetting("NCCL_ALGO", _is_set, "NCCL cannot choose the algorithm by size and topology"),
    CostlySetting(
        "NCCL_PROTO", _is_set, "NCCL cannot choose the protocol by size: one for small messages wastes bandwidth"
    ),
    CostlySetting(
        "NCCL_MAX_NCHANNELS", _is_one, "one channel: a collective uses one block of each GPU and few of its links"
    ),
    CostlySetting("NCCL_MAX_CTAS", _is_one, "one block of each GPU serves a collective: it can't fill NVLink"),
    CostlySetting(
        "NCCL_DEBUG",
        lambda value: value.strip().upper() in ("INFO", "TRACE"),
        "each rank writes many lines; TRACE (in builds that support it) several per collective",
        "unset it, or WARN",
    ),
    CostlySetting(
        "NCCL_SOCKET_IFNAME",
        lambda value: value.strip().lstrip("=") == "lo",
        "ranks on other hosts can't be reached",
        "name the interface that the hosts share",
    ),
    CostlySetting(
        "GLOO_SOCKET_IFNAME",
        lambda value: value.strip() == "lo",
        "ranks on other hosts can't be reached",
        "name the interface that the hosts share",
    ),
    CostlySetting(
        "TORCH_NCCL_BLOCKING_WAIT",
        _is_on,
        "the thread that launches kernels waits for each collective, so no later kernel is queued",
    ),
    CostlySetting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _is_off,
        "a collective that failed hangs its rank instead of ending it",
    ),
    CostlySetting(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.strip().upper() == "DETAIL",
        "before each collective, further ones compare its arguments between ranks",
        "unset it, or INFO",
    ),
    CostlySetting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _is_one,
        "kernels of all streams share one queue: an all-gather behind compute waits for it",
        "unset it, unless tensor parallelism needs it",
    ),
    CostlySetting(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", _is_on, "each tensor is allocated by the driver, which waits for the GPU"
    ),
    CostlySetting(
        "NVIDIA_TF32_OVERRIDE", _is_off, "float32 matrix products never use tensor cores, whatever torch's settings are"
    ),
    CostlySetting("TORCHDYNAMO_DISABLE", _is_on, "torch.compile does nothing"),
    CostlySetting(
        "WINDLASS_TRANSPORT",
        lambda value: value.strip().lower() == "gloo",
        "CPU ranks of one host send data that they could read in shared memory",
        "unset it: shared memory is chosen if it is available",
    ),
    CostlySetting(
        "WINDLASS_KERNELS",
        lambda value: value.strip().lower() in ("reference", "baseline"),
        "optimizer updates on the CPU do not use the fastest code for this processor",
    ),
    CostlySetting(
        "WINDLASS_DISK_ENGINE",
        lambda value: value.strip() == "python",
        "Python threads transfer each block of the disk tier",
    ),
    CostlySetting(
        "WINDLASS_EMULATE_DEVICE", _is_set, "a device is emulated, with copies to it that no computation needs"
    ),
)


def find_costly_settings(
    environment: Mapping[str, str] = os.environ, nccl_file: Path | None = None, cores: int | None = None
) -> list[dict[str, str]]:
    """Return the costly settings in force, with the keys `name`, `value`, `source`, `costs` and `instead` (the remedy).

    Args:
        nccl_file: file of NCCL settings for variables that the environment lacks; None: the file in the variable
            NCCL_CONF_FILE, else /etc/nccl.conf.
        cores: number of cores that this process may use; None skips the check for too many threads.
    """
    nccl_file = nccl_file or Path(environment.get("NCCL_CONF_FILE") or NCCL_FILE)
    of_file = _read_nccl_file(nccl_file)
    found = []
    for setting in COSTLY_SETTINGS:
        source = _ENVIRONMENT if setting.name in environment else str(nccl_file)  # the environment overrides the file
        value = environment.get(setting.name, of_file.get(setting.name, ""))
        if value and setting.is_costly(value):
            found.append(_finding(setting.name, value, source, setting.consequence, setting.remedy))
    threads = environment.get("OMP_NUM_THREADS", "")
    if cores and threads.isdigit() and int(threads) > cores:
        costs = f"{threads} threads a rank share {cores} cores and wait for each other"
        found.append(
            _finding("OMP_NUM_THREADS", threads, _ENVIRONMENT, costs, "cores divided by the ranks of this host")
        )
    return found


def _finding(name: str, value: str, source: str, costs: str, instead: str) -> dict[str, str]:
    return {"name": name, "value": value, "source": source, "costs": costs, "instead": instead}


def _read_nccl_file(path: Path) -> dict[str, str]:
    """Read the NAME=VALUE lines of NCCL's configuration file; empty if there is no file."""
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(errors="replace").splitlines())
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


@dataclass(frozen=True)
class MachineLimits:
    """Limits of this machine and process that `find_low_limits` checks.

    Attributes:
        num_gpus: number of GPUs visible to torch.
        has_infiniband: True if there is an InfiniBand device.
        locked_bytes, open_files: limits of this process on bytes of locked memory and on open files; None: unlimited.
        shared_bytes: size of /dev/shm; None: it does not exist.
    """

    num_gpus: int
    has_infiniband: bool
    locked_bytes: int | None
    open_files: int | None
    shared_bytes: int | None


def find_low_limits(machine: MachineLimits) -> list[dict[str, str]]:
    """Return limits of the machine or the container that are too low, in the format of `find_costly_settings`."""
    return [_finding(*limit) for limit in _low_limits(machine)]


def _low_limits(machine: MachineLimits) -> Iterator[tuple[str, str, str, str, str]]:
    if machine.has_infiniband and machine.locked_bytes is not None and machine.locked_bytes < _GIB:
        costs = "InfiniBand can't register its buffers: NCCL fails, or falls back to sockets"
        yield "locked memory", f"{machine.locked_bytes} bytes", "limit", costs, "ulimit -l unlimited"
    if machine.num_gpus > 1 and machine.shared_bytes is not None and machine.shared_bytes < _GIB:
        costs = "NCCL's shared memory between GPUs may not fit: its start fails"
        yield "/dev/shm", f"{machine.shared_bytes} bytes", "limit", costs, "docker run --shm-size=8g, or --ipc=host"
    if machine.open_files is not None and machine.open_files < 1024:
        costs = "ranks, data loaders and the disk tier run out of descriptors"
        yield "open files", str(machine.open_files), "limit", costs, "ulimit -n 65536"
