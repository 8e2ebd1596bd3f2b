"""Starts a program on N local ranks through torch's elastic launcher, and brings back how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from windlass.base.errors import WindlassError
from windlass.base.log import logger
from windlass.launch import rank
from windlass.launch.outcome import Failure, Outcome, outcome_of

_HOST = "127.0.0.1"
_TAKEN_OVER = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class LaunchError(WindlassError, RuntimeError):
    """Ranks that cannot be started: no such script, a port in use, an impossible number."""


def launch(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> int:
    """Run `entrypoint` on `nproc` ranks of this machine; what failures there are is theirs to print.

    Args:
        entrypoint: what follows `python`: a script and its arguments (or `-m module ...`).
        nproc: number of ranks.
        module: the first word of `entrypoint` is a module's name.
        env: set in the ranks' environment, over what they inherit.
        grace_s: seconds that ranks have to end after Ctrl-C, before they are killed.

    Returns:
        The worst exit code of the ranks, 128 + its number for a signal that ended one, or that this process was sent.

    Raises:
        LaunchError: the ranks cannot be started.
    """
    return start(entrypoint, nproc, module=module, env=env, grace_s=grace_s).code


def start(
    entrypoint: list[str],
    nproc: int,
    *,
    module: bool = False,
    master_port: int | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30,
) -> Outcome:
    """Like `launch`, but tells which ranks failed too, and takes the port at which they meet (by default a free one).

    Ranks die with this process, even if it is killed (Linux). SIGINT, SIGTERM, SIGHUP and SIGQUIT are passed on to them
    with `grace_s` seconds to end. Only in the main thread, whose signals these are.
    """
    _check(entrypoint, nproc, module, master_port)
    command = _command(entrypoint, module)
    # The launcher imports torch; whoever only asks for help should not wait for that.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="windlass-launch-") as logs,
        _environment({**_threads(nproc, env or {}), **(env or {})}),
        _own_signals(),
        _quiet_torch(),
    ):
        try:
            elastic_launch(_config(nproc, master_port, grace_s, logs), command[0])(*command[1:])
        except ChildFailedError as error:
            return outcome_of([Failure(index, one.exitcode, one.timestamp) for index, one in error.failures.items()])
        except SignalException as error:
            return Outcome(128 + error.sigval, interrupted_by=int(error.sigval))
    return Outcome(0)


def threads_per_rank(nproc: int) -> int:
    """An equal share of the cores that this process may use, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // nproc)


def _threads(nproc: int, given: Mapping[str, str]) -> dict[str, str]:
    if "OMP_NUM_THREADS" in {*os.environ, *given}:
        return {}
    threads = threads_per_rank(nproc)
    logger.info("OMP_NUM_THREADS=%d for each of %d ranks, their share of the cores (set it to choose)", threads, nproc)
    return {"OMP_NUM_THREADS": str(threads)}


def _check(entrypoint: list[str], nproc: int, module: bool, master_port: int | None) -> None:
    if not entrypoint:
        raise LaunchError("nothing to run: name a script, or a module with --module")
    if nproc < 1:
        raise LaunchError(f"--nproc is {nproc}; at least one rank is needed")
    if not module and not entrypoint[0].startswith("-") and not Path(entrypoint[0]).exists():
        raise LaunchError(f"no such script: {entrypoint[0]}; check the path, or give --module to name a module")
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("ranks can only be started from the main thread: they end with the thread that started them")
    if master_port is not None and not 0 < master_port < 65536:
        raise LaunchError(f"--master-port {master_port} is no port; give one from 1 to 65535, or none")
    if master_port is not None and not _is_free(master_port):
        raise LaunchError(f"port {master_port} is in use; leave out --master-port and a free one is taken")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


def _command(entrypoint: list[str], module: bool) -> list[str]:
    python = [sys.executable, "-u", *(["-m"] if module else []), *entrypoint]
    if sys.platform == "linux":
        python = [sys.executable, "-I", "-S", rank.__file__, str(os.getpid()), *python]
    return [word.replace("$", "$$") for word in python]  # torch fills templates into arguments


def _config(nproc: int, master_port: int | None, grace_s: float, logs: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    config: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": nproc,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "max_restarts": 0,
        "local_addr": _HOST,  # else the host's name is looked up, which many containers cannot
        "logs_specs": DefaultLogsSpecs(log_dir=logs),  # else torch leaves a folder in the system's temporary one
        "signals_to_handle": ",".join(_signals_to_handle()),
        "shutdown_timeout": round(grace_s),
    }
    if master_port is not None:
        config |= {"rdzv_backend": "static", "rdzv_endpoint": f"{_HOST}:{master_port}", "rdzv_configs": {"rank": 0}}
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older torch has no signals_ or shutdown_
    return LaunchConfig(**{name: value for name, value in config.items() if name in known})


def _signals_to_handle() -> list[str]:
    """What is passed on to the ranks. A hang-up that `nohup` had ignored stays ignored."""
    names = [name for name in _TAKEN_OVER if hasattr(signal, name)]
    if "SIGHUP" in names and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        names.remove("SIGHUP")
    return names


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """The launcher has no other way to give ranks variables than its own environment."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Puts back the handlers that the launcher replaces and leaves behind."""
    before = {number: signal.getsignal(number) for name in _TAKEN_OVER if (number := getattr(signal, name, None))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """The launcher's own account of a failure repeats what ranks printed; torch's `LOGLEVEL` brings it back."""
    if "LOGLEVEL" in os.environ:
        yield
        return
    torch_log = logging.getLogger("torch.distributed.elastic")
    silence, before = logging.NullHandler(), torch_log.propagate
    torch_log.addHandler(silence)
    torch_log.propagate = False
    try:
        yield
    finally:
        torch_log.removeHandler(silence)
        torch_log.propagate = before
