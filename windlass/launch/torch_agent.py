"""Launch by torch's elastic agent, for hosts that find each other by a rendezvous."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from windlass.base.processes import temporary_environment
from windlass.launch import exec_rank
from windlass.launch.exit_status import LaunchExitStatus, RankFailure, combine_failures
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_flags import build_run_parser
from windlass.launch.local_launch import check_main_thread
from windlass.launch.plan_from_flags import forwarded_signals
from windlass.launch.program import Program

TORCHRUN_FLAGS = (
    *("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "local_addr", "max_restarts", "role"),
    *("monitor_interval", "start_method", "event_log_handler", "logs_specs", "numa_binding", "signals_to_handle"),
    *("redirects", "tee", "local_ranks_filter", "log_dir", "master_addr", "master_port", "virtual_local_rank"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters"),
)
"""Flags that torchrun has under the same names; empty values (None, False, "") are not passed on."""

UNSUPPORTED_FLAGS = (
    *("hostfile", "include", "exclude", "num_nodes", "launcher", "launcher_args", "ssh_port", "venv_script", "no_ssh"),
    *("force_multi", "watch", "labels", "enable_each_rank_log", "bind_cores_to_rank", "bind_core_list", "save_pid"),
    *("servers", "replicas", "workers", "min_nproc", "elastic_training", "min_elastic_nodes"),
)
"""Flags of `windlass run` that a launch with a rendezvous refuses."""


def start_with_torch_agent(args: argparse.Namespace, program: Program, env: Mapping[str, str]) -> LaunchExitStatus:
    """Start this host's ranks after the rendezvous of the number of hosts that `--nnodes` sets.

    Raises:
        LaunchError: a flag cannot be combined with a rendezvous, or torch rejects one.
    """
    check_main_thread()
    parser = build_run_parser()
    for name in UNSUPPORTED_FLAGS:
        if getattr(args, name) not in (parser.get_default(name), False):
            raise LaunchError(
                f"--{name} cannot be combined with a rendezvous, where each host starts by itself; leave it out"
            )
    if args.nproc and args.num_gpus >= 0:
        raise LaunchError("--num_gpus and --nproc together; give one of them")
    forwarded_signals(args)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    with (
        tempfile.TemporaryDirectory(prefix="windlass-launch-") as logs,
        temporary_environment(env),
        _restored_signal_handlers(),
        _silenced_torch_log(),
    ):
        command = [sys.executable, "-I", "-S", exec_rank.__file__, str(os.getpid())] if sys.platform == "linux" else []
        command = [
            word.replace("$", "$$") for word in [*command, *program.argv_for_rank(0)]
        ]  # torch expands $ templates in arguments, and $$ to $
        try:
            elastic_launch(_torch_launch_config(args, logs), command[0])(*command[1:])
        except ChildFailedError as error:
            return combine_failures(
                [RankFailure(index, one.exitcode, one.timestamp) for index, one in error.failures.items()]
            )
        except SignalException as error:
            return LaunchExitStatus(128 + error.sigval, interrupted_by=int(error.sigval))
    return LaunchExitStatus(0)


def _torch_launch_config(args: argparse.Namespace, log_dir: str) -> Any:
    from torch.distributed.run import config_from_args, get_args_parser

    given = {
        name: value for name in TORCHRUN_FLAGS if (value := getattr(args, name, None)) not in (None, False, "", [])
    }
    nproc = args.nproc or (args.num_gpus if args.num_gpus > 0 else "auto")
    words = [f"--nproc-per-node={nproc}", f"--shutdown-timeout={round(args.grace)}"]
    words += [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
    if "log_dir" not in given:
        words.append(f"--log-dir={log_dir}")
    parser = get_args_parser()
    known = [word for word in words if word.partition("=")[0] in parser._option_string_actions]
    if dropped := [word for word in words if word not in known and not word.startswith("--shutdown")]:
        raise LaunchError(f"{dropped[0]}: this version of torch lacks it; install a newer one, or leave it out")
    try:
        config, _, _ = config_from_args(parser.parse_args([*known, "script"]))
    except (ValueError, RuntimeError) as error:
        raise LaunchError(f"torch rejects these flags: {error}") from error
    return config


@contextlib.contextmanager
def _restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces and does not restore."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _silenced_torch_log() -> Iterator[None]:
    """Silence the agent's report of a failure, which repeats the output of ranks, unless `LOGLEVEL` is set."""
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
