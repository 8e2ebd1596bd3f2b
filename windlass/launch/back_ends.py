"""The command lines of pdsh, of the MPIs and of Slurm for a plan: words and environment, nothing executed here."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from windlass.launch.errors import LaunchError
from windlass.launch.plan import Plan
from windlass.launch.quoting import check_host, shell_text
from windlass.launch.scheduled import encode

_FAN_OUT = 1024


@dataclass(frozen=True)
class Asked:
    """What else was asked of a back end.

    Args:
        arguments: `--launcher_args`.
        num_gpus: `--num_gpus`, below 1 where it was not given.
        agent_path: PYTHONPATH on other hosts.
        ssh_words: what PDSH_SSH_ARGS_APPEND says already.
    """

    arguments: str = ""
    ssh_port: int | None = None
    venv_script: str | None = None
    num_gpus: int = -1
    agent_path: str = ""
    ssh_words: str = ""

    @property
    def words(self) -> list[str]:
        """The arguments, split as a shell would.

        Raises:
            LaunchError: a quote that does not end.
        """
        try:
            return shlex.split(self.arguments)
        except ValueError as error:
            raise LaunchError(f"--launcher_args {self.arguments!r}: {error}") from None


@dataclass(frozen=True)
class Command:
    """What to execute, and what to set in its environment."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def command_of(launcher: str, plan: Plan, asked: Asked) -> Command:
    """The command that starts all ranks of `plan`.

    Raises:
        LaunchError: the back end cannot do what the plan says, or there is no such back end.
    """
    for host in plan.hosts:
        check_host(host.name)
    if launcher != "pdsh" and (asked.ssh_port is not None or asked.venv_script is not None):
        raise LaunchError(f"--ssh_port and --venv_script do not apply to --launcher {launcher}; ssh and pdsh take them")
    if launcher not in _BUILDERS:
        raise LaunchError(f"--launcher {launcher} is unknown; choose ssh, {', '.join(_BUILDERS)}")
    return _BUILDERS[launcher](plan, asked)


def is_installed(launcher: str) -> bool:
    """Whether this machine has the back end's program."""
    program = {"pdsh": "pdsh", "openmpi": "ompi_info", "slurm": "srun", "mvapich": "mpiname"}.get(launcher, "mpirun")
    if shutil.which(program) is None:
        return False
    if launcher == "mvapich":
        return "MVAPICH2-GDR" in subprocess.run([program], capture_output=True, text=True).stdout
    return True


def pdsh(plan: Plan, asked: Asked) -> Command:
    """One agent a host, told its number by pdsh itself; `-b`: one Ctrl-C ends it."""
    environment = {"PDSH_RCMD_TYPE": "ssh"}
    if asked.ssh_port is not None:
        environment["PDSH_SSH_ARGS_APPEND"] = f"{asked.ssh_words} -p {asked.ssh_port}".strip()
    agent = [sys.executable, "-u", "-m", "windlass.launch.node_alone", "NODE", encode(plan)]
    text = shell_text(agent, env={"PYTHONPATH": asked.agent_path}, cwd=plan.cwd)
    if asked.venv_script is not None:
        text = f"{shell_text(['.', asked.venv_script], cwd=plan.cwd).replace('exec . ', '. ')} && {text}"
    text = text.replace("%", "%%").replace(" NODE ", " %n ")  # pdsh fills in %n, and a %% is a %
    hosts = ",".join(host.name for host in plan.hosts)
    words = ["pdsh", "-S", "-b", "-f", str(_FAN_OUT), "-w", hosts, *asked.words]
    return Command([*words, shell_text(["sh", "-c", text])], environment)


def openmpi(plan: Plan, asked: Asked) -> Command:
    """`-x NAME` hands on the value that mpirun itself has: none is on the command line."""
    hosts = ",".join(f"{host.name}:{len(host.slots)}" for host in plan.hosts)
    words = ["mpirun", "-n", str(plan.world_size), "--host", hosts, "--map-by", "slot", "--bind-to", "none"]
    exported = [word for name in sorted(plan.env) for word in ("-x", name)]
    return Command([*words, *asked.words, *exported, *_rank(plan)], dict(plan.env))


def mpich(plan: Plan, asked: Asked) -> Command:
    """Hydra: hosts with their numbers of ranks."""
    hosts = ",".join(f"{host.name}:{len(host.slots)}" for host in plan.hosts)
    words = ["mpirun", "-n", str(plan.world_size), "-hosts", hosts, *asked.words]
    return Command([*words, *_exported_by_hydra(plan), *_rank(plan)], dict(plan.env))


def impi(plan: Plan, asked: Asked) -> Command:
    """Intel MPI: as many ranks on each host, which do not let it bind them."""
    each = _equal(plan, "impi")
    hosts = ",".join(host.name for host in plan.hosts)
    words = ["mpirun", "-n", str(plan.world_size), "-ppn", str(each), "-hosts", hosts, *asked.words]
    return Command([*words, *_exported_by_hydra(plan), *_rank(plan)], {**plan.env, "I_MPI_PIN": "0"})


def mvapich(plan: Plan, asked: Asked) -> Command:
    """MVAPICH2-GDR: Hydra with variables of its own."""
    each = _equal(plan, "mvapich")
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
    words = ["mpirun", "-np", str(plan.world_size), "-ppn", str(each), "-hosts", hosts, *asked.words]
    environment = {**own, **plan.env}
    return Command([*words, *_exported_by_hydra(plan, environment), *_rank(plan)], environment)


def slurm(plan: Plan, asked: Asked) -> Command:
    """srun hands on its whole environment. It places ranks by number, not by device."""
    each = _equal(plan, "slurm")
    for host in plan.hosts:
        if list(host.slots) != list(range(each)):
            raise LaunchError(
                f"--launcher slurm cannot choose slots {','.join(map(str, host.slots))} of {host.name}; leave out "
                "whole hosts, or keep the first slots of each"
            )
    hosts = ",".join(host.name for host in plan.hosts)
    words = ["srun", "-N", str(len(plan.hosts)), "-n", str(plan.world_size), f"--ntasks-per-node={each}"]
    words += [f"--nodelist={hosts}", "--distribution=block", "--kill-on-bad-exit=1", "--export=ALL"]
    if asked.num_gpus > 0:
        words.append(f"--gpus-per-node={asked.num_gpus}")
    return Command([*words, *asked.words, *_rank(plan)], dict(plan.env))


_BUILDERS: Mapping[str, Callable[[Plan, Asked], Command]] = {
    "pdsh": pdsh,
    "openmpi": openmpi,
    "mpich": mpich,
    "impi": impi,
    "slurm": slurm,
    "mvapich": mvapich,
}


def _rank(plan: Plan) -> list[str]:
    """What each rank executes; the plan's variables reach it by the back end, where who lists processes sees none."""
    return [sys.executable, "-u", "-m", "windlass.launch.scheduled", encode(replace(plan, env={}))]


def _exported_by_hydra(plan: Plan, environment: Mapping[str, str] | None = None) -> list[str]:
    names = ",".join(sorted(environment or plan.env))
    return ["-genvlist", names] if names else []


def _equal(plan: Plan, launcher: str) -> int:
    """The number of ranks on each host."""
    counts = {host.name: len(host.slots) for host in plan.hosts}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise LaunchError(f"--launcher {launcher} needs as many slots on every host, and there are {told}")
    return len(plan.hosts[0].slots)
