"""Command `ds_ssh`: runs one command on every host of a hostfile, over pdsh if it is installed, else over ssh."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.errors import WindlassError
from windlass.base.text import print_escaped
from windlass.launch.hostfile import DEFAULT_HOSTFILE, fetch_hostfile
from windlass.launch.launcher_backends import is_installed
from windlass.launch.ssh_connection import SshConnectionOptions

_MAX_HOSTS_AT_ONCE = 64


@exit_quietly_on_broken_pipe()
def ds_ssh(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv` on all hosts. Return the highest exit code, or 1 without a usable hostfile."""
    parser = argparse.ArgumentParser("ds_ssh", usage="ds_ssh [-f HOSTFILE] COMMAND [ARGUMENT]...", description=__doc__)
    parser.add_argument("-f", dest="hostfile", default=DEFAULT_HOSTFILE, help=f"hostfile [{DEFAULT_HOSTFILE}]")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command, which the shell of each host reads")
    asked = parser.parse_args(argv)
    if not asked.command:
        parser.print_help()
        return 1
    text = " ".join(asked.command) if len(asked.command) > 1 else asked.command[0]
    try:
        hosts = fetch_hostfile(asked.hostfile)
        if hosts is None:
            print_escaped(f"ds_ssh: there is no hostfile at {asked.hostfile}; give one with -f", to_stderr=True)
            return 1
        if is_installed("pdsh"):
            environment = {**os.environ, "PDSH_RCMD_TYPE": "ssh"}
            return subprocess.run(["pdsh", "-S", "-w", ",".join(hosts), text], env=environment, check=False).returncode
        if shutil.which("ssh") is None:
            print_escaped("ds_ssh: neither pdsh nor ssh is installed; install one of them", to_stderr=True)
            return 1
        commands = {host: SshConnectionOptions().ssh_argv(host, f"sh -c {shlex.quote(text)}") for host in hosts}
    except WindlassError as error:
        print_escaped(f"ds_ssh: {error}", to_stderr=True)
        return 1
    with ThreadPoolExecutor(min(len(commands), _MAX_HOSTS_AT_ONCE)) as pool:
        return max(pool.map(lambda item: _run_on(*item), commands.items()))


def _run_on(host: str, command: list[str]) -> int:
    """Run a command and print its lines with the host's name before them. Return its exit code."""
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process,
        ThreadPoolExecutor(1) as side,
    ):
        assert process.stdout is not None and process.stderr is not None
        errors = side.submit(_print_lines, host, process.stderr, True)
        _print_lines(host, process.stdout, False)
        errors.result()
    code = process.returncode
    return code if code >= 0 else 128 - code


def _print_lines(host: str, stream: IO[str], to_stderr: bool) -> None:
    for line in stream:
        print_escaped(f"{host}: {line.rstrip()}", to_stderr=to_stderr)


def main() -> None:
    """Run `ds_ssh` and exit with its code."""
    sys.exit(ds_ssh())
