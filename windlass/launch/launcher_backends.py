"""Command lines and environments of pdsh, MPI launchers and Slurm for a plan. The commands are not executed here."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from windlass.launch.external_rank import encode_plan
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.shell_quoting import check_host_name, shell_command

_PDSH_FANOUT = 1024


@dataclass(frozen=True)
class LauncherOptions:
    """Further options of a launcher backend.

    Args:
        launcher_args: value of `--launcher_args`.
        num_gpus: value of `--num_gpus`; below 1 if not given.
        agent_pythonpath: PYTHONPATH on other hosts.
        pdsh_ssh_args: value of PDSH_SSH_ARGS_APPEND.
    """

    launcher_args: str = ""
    ssh_port: int | None = None
    venv_script: str | None = None
    num_gpus: int = -1
    agent_pythonpath: str = ""
    pdsh_ssh_args: str = ""

    @property
    def launcher_argv(self) -> list[str]:
        """`launcher_args`, split as a shell would.

        Raises:
            LaunchError: a quote is not closed.
        """
        try:
            return shlex.split(self.launcher_args)
        except ValueError as error:
            raise LaunchError(f"--launcher_args {self.launcher_args!r}: {error}") from None


@dataclass(frozen=True)
class LauncherCommand:
    """Command to execute, and variables to set in its environment."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


def build_launcher_command(launcher: str, plan: LaunchPlan, options: LauncherOptions) -> LauncherCommand:
    """Build the command that starts all ranks of `plan`.

    Raises:
        LaunchError: the backend does not exist, does not support a feature of the plan or lacks an option, or a host
            name is invalid.
    """
    for host in plan.hosts:
        check_host_name(host.name)
    if launcher != "pdsh" and (options.ssh_port is not None or options.venv_script is not None):
        raise LaunchError(f"--ssh_port and --venv_script do not apply to --launcher {launcher}; ssh and pdsh take them")
    if launcher not in _COMMAND_BUILDERS:
        raise LaunchError(f"--launcher {launcher} is unknown; choose ssh, {', '.join(_COMMAND_BUILDERS)}")
    return _COMMAND_BUILDERS[launcher](plan, options)


def identifying_program(launcher: str) -> str:
    """Return the program by which an installation of the backend is found. Several MPIs have an `mpirun`."""
    return {"pdsh": "pdsh", "openmpi": "ompi_info", "slurm": "srun", "mvapich": "mpiname"}.get(launcher, "mpirun")


def is_installed(launcher: str) -> bool:
    """Return True if the backend's program is in a folder of PATH on this machine."""
    program = identifying_program(launcher)
    if shutil.which(program) is None:
        return False
    if launcher == "mvapich":
        return "MVAPICH2-GDR" in subprocess.run([program], capture_output=True, text=True).stdout
    return True


def pdsh_command(plan: LaunchPlan, options: LauncherOptions) -> LauncherCommand:
    """Build a pdsh command that starts one agent per host. pdsh replaces `%n` by the host's index."""
    environment = {"PDSH_RCMD_TYPE": "ssh"}
    if options.ssh_port is not None:
        environment["PDSH_SSH_ARGS_APPEND"] = f"{options.pdsh_ssh_args} -p {options.ssh_port}".strip()
    agent = [sys.executable, "-u", "-P", "-m", "windlass.launch.pdsh_agent", "NODE", encode_plan(plan)]
    text = shell_command(agent, env={"PYTHONPATH": options.agent_pythonpath}, cwd=plan.cwd)
    if options.venv_script is not None:
        text = f"{shell_command(['.', options.venv_script], cwd=plan.cwd).replace('exec . ', '. ')} && {text}"
    text = text.replace("%", "%%").replace(" NODE ", " %n ")  # pdsh replaces %n by the host's index and %% by %
    hosts = ",".join(host.name for host in plan.hosts)
    # -S: return the largest exit code of the hosts; -b: a single Ctrl-C ends pdsh
    words = ["pdsh", "-S", "-b", "-f", str(_PDSH_FANOUT), "-w", hosts, *options.launcher_argv]
    return LauncherCommand([*words, shell_command(["sh", "-c", text])], environment)


def openmpi_command(plan: LaunchPlan, options: LauncherOptions) -> LauncherCommand:
    """Build an Open MPI command. `-x NAME` exports a variable with its value in mpirun's
    environment, so that no value is on the command line."""
    hosts = ",".join(f"{host.name}:{len(host.slots)}" for host in plan.hosts)
    words = ["mpirun", "-n", str(plan.world_size), "--host", hosts, "--map-by", "slot", "--bind-to", "none"]
    exported = [word for name in sorted(plan.env) for word in ("-x", name)]
    return LauncherCommand([*words, *options.launcher_argv, *exported, *_rank_argv(plan)], dict(plan.env))


def mpich_command(plan: LaunchPlan, options: LauncherOptions) -> LauncherCommand:
    """Build an MPICH (Hydra) command, with the number of ranks of each host."""
    hosts = ",".join(f"{host.name}:{len(host.slots)}" for host in plan.hosts)
    words = ["mpirun", "-n", str(plan.world_size), "-hosts", hosts, *options.launcher_argv]
    return LauncherCommand([*words, *_hydra_export_arguments(plan), *_rank_argv(plan)], dict(plan.env))


def impi_command(plan: LaunchPlan, options: LauncherOptions) -> LauncherCommand:
    """Build an Intel MPI command. All hosts need the same number of ranks; MPI's own pinning is turned off."""
    each = _equal_ranks_per_host(plan, "impi")
    hosts = ",".join(host.name for host in plan.hosts)
    words = ["mpirun", "-n", str(plan.world_size), "-ppn", str(each), "-hosts", hosts, *options.launcher_argv]
    return LauncherCommand([*words, *_hydra_export_arguments(plan), *_rank_argv(plan)], {**plan.env, "I_MPI_PIN": "0"})


def mvapich_command(plan: LaunchPlan, options: LauncherOptions) -> LauncherCommand:
    """Build an MVAPICH2-GDR command: Hydra with further environment variables."""
    each = _equal_ranks_per_host(plan, "mvapich")
    own = {
        "MV2_SMP_USE_CMA": "0",
        "MV2_DEBUG_SHOW_BACKTRACE": "1",
        "MV2_USE_CUDA": "1",
        "MV2_SUPPORT_DL": "1",
        "MV2_ENABLE_AFFINITY": "0",
        "MV2_INTER_ALLGATHER_TUNING": "5",
        "MV2_CUDA_USE_NAIVE": "0",
    }
    hosts = ",".join(host.name for host in plan.hosts)
    words = ["mpirun", "-np", str(plan.world_size), "-ppn", str(each), "-hosts", hosts, *options.launcher_argv]
    environment = {**own, **plan.env}
    return LauncherCommand([*words, *_hydra_export_arguments(plan, environment), *_rank_argv(plan)], environment)


def slurm_command(plan: LaunchPlan, options: LauncherOptions) -> LauncherCommand:
    """Build an srun command. srun exports its full environment to the ranks. It takes a number of ranks per
    host, and no choice of devices.

    Raises:
        LaunchError: hosts have different numbers of slots, or slots other than the first.
    """
    each = _equal_ranks_per_host(plan, "slurm")
    for host in plan.hosts:
        if list(host.slots) != list(range(each)):
            raise LaunchError(
                f"--launcher slurm cannot choose slots {','.join(map(str, host.slots))} of {host.name}; leave out "
                "whole hosts, or keep the first slots of each"
            )
    hosts = ",".join(host.name for host in plan.hosts)
    words = ["srun", "-N", str(len(plan.hosts)), "-n", str(plan.world_size), f"--ntasks-per-node={each}"]
    words += [f"--nodelist={hosts}", "--distribution=block", "--kill-on-bad-exit=1", "--export=ALL"]
    if options.num_gpus > 0:
        words.append(f"--gpus-per-node={options.num_gpus}")
    return LauncherCommand([*words, *options.launcher_argv, *_rank_argv(plan)], dict(plan.env))


_COMMAND_BUILDERS: Mapping[str, Callable[[LaunchPlan, LauncherOptions], LauncherCommand]] = {
    "pdsh": pdsh_command,
    "openmpi": openmpi_command,
    "mpich": mpich_command,
    "impi": impi_command,
    "slurm": slurm_command,
    "mvapich": mvapich_command,
}


def _rank_argv(plan: LaunchPlan) -> list[str]:
    """Return the command of each rank. The backend passes the environment variables, so that process
    listings do not show them."""
    return [sys.executable, "-u", "-m", "windlass.launch.external_rank", encode_plan(replace(plan, env={}))]


def _hydra_export_arguments(plan: LaunchPlan, environment: Mapping[str, str] | None = None) -> list[str]:
    names = ",".join(sorted(environment or plan.env))
    return ["-genvlist", names] if names else []


def _equal_ranks_per_host(plan: LaunchPlan, launcher: str) -> int:
    """Return the number of ranks on each host; raise if hosts differ."""
    counts = {host.name: len(host.slots) for host in plan.hosts}
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise LaunchError(f"--launcher {launcher} needs equally many slots on every host, and there are {counts_text}")
    return len(plan.hosts[0].slots)
