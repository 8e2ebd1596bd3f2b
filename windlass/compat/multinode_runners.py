"""Module `deepspeed.launcher.multinode_runner`: classes that build pdsh, MPI and Slurm commands.

Scripts construct or subclass these classes. The commands start the script as DeepSpeed's do. `windlass run --launcher`
does not use them: it builds its own commands (`windlass.launch.launcher_backends`), which also pass on the launch plan.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from shlex import split
from typing import Any, ClassVar

from windlass.compat.accelerator.real_accelerator import get_accelerator
from windlass.compat.numa_cores import get_numactl_cmd
from windlass.launch.launcher_backends import is_installed

PDSH_MAX_FAN_OUT = 1024

_NEEDS_QUOTES = re.compile(r"[^\w@%+=:,./-]")


class MultiNodeRunner(ABC):
    """Base class of runners; a runner builds the command of one launcher backend.

    Args:
        args: result of `deepspeed.launcher.runner.parse_args`.
        world_info_base64: result of `deepspeed.launcher.runner.encode_world_info`.
    """

    def __init__(self, args: Any, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    @abstractmethod
    def backend_exists(self) -> Any:
        """Return a true value if the backend is installed."""

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]) -> Any:
        """Return the command that starts all ranks."""

    def add_export(self, key: str, var: str) -> None:
        """Set an environment variable on all hosts. Values with shell metacharacters are quoted."""
        value = var.strip()
        self.exports[key.strip()] = f'"{value}"' if _NEEDS_QUOTES.search(value) else value

    def parse_user_args(self) -> list[str]:
        """Return the arguments of the user's script."""
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """Name of the backend."""
        return type(self).__name__

    def validate_args(self) -> None:  # noqa: B027 - a backend may accept all arguments
        """Raise ValueError for arguments that the backend cannot honour."""

    @classmethod  # noqa: B027
    def validate_active_resources(cls, active_resources: Mapping[str, Any]) -> None:
        """Raise ValueError for a choice of slots that the backend cannot honour."""

    def _python(self) -> list[str]:
        if self.args.no_python:
            return []
        return [sys.executable, "-u", *(["-m"] if self.args.module else [])]

    def _script(self) -> list[str]:
        return [self.user_script, *self.user_arguments]


class PDSHRunner(MultiNodeRunner):
    """Runner with pdsh: one `deepspeed.launcher.launch` on each host."""

    def backend_exists(self) -> Any:
        """Return a true value if pdsh is installed."""
        return shutil.which("pdsh")

    @property
    def name(self) -> str:
        """Name "pdsh"."""
        return "pdsh"

    def parse_user_args(self) -> list[str]:
        """Return the arguments. Arguments with spaces are quoted, because the remote shell splits the line again."""
        return [_quoted(word) for word in self.args.user_args]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """Return the command, the command that ends all ranks, and the environment of both."""
        args = self.args
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if args.ssh_port is not None:
            environment["PDSH_SSH_ARGS_APPEND"] = (
                f"{environment.get('PDSH_SSH_ARGS_APPEND', '')} -p {args.ssh_port}".strip()
            )
        hosts = ",".join(active_resources)
        pdsh = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", hosts, *split(args.launcher_args)]
        agent = [
            "".join(f"export {key}={value}; " for key, value in self.exports.items()),
            f"cd {os.path.abspath('.')};",
            sys.executable,
            "-u",
            "-m",
            "deepspeed.launcher.launch",
            f"--world_info={self.world_info_base64}",
            "--node_rank=%n",
            f"--master_addr={args.master_addr}",
            f"--master_port={args.master_port}",
        ]
        searched = "\\ ".join(agent[2:6])
        if args.venv_script is not None:
            agent.insert(0, f"source {args.venv_script};")
        agent += [f"--{flag}" for flag in ("no_python", "module", "no_local_rank") if getattr(args, flag)]
        if args.save_pid:
            agent += ["--save_pid", str(os.getpid())]
        if args.enable_each_rank_log:
            agent.append(f"--enable_each_rank_log={args.enable_each_rank_log}")
        kill = [*pdsh, "pkill -f ", searched]
        return [*pdsh, *agent, *self._script()], kill, environment


class _MPIRunner(MultiNodeRunner):
    """Base class of the MPI runners, which always use all hosts and slots of the hostfile."""

    label: ClassVar[str]
    program: ClassVar[str] = "mpirun"

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> Any:
        """Return a true value if the backend's program is installed."""
        return shutil.which(self.program)

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self.label

    def validate_args(self) -> None:
        """Raise ValueError for --include, --exclude, --num_nodes and --num_gpus."""
        if self.args.include or self.args.exclude:
            raise ValueError(f"--launcher {self.label} takes no --include or --exclude; name the hosts in a hostfile")
        if self.args.num_nodes != -1 or self.args.num_gpus != -1:
            raise ValueError(f"--launcher {self.label} takes no --num_nodes or --num_gpus; write them in a hostfile")

    def _world(self) -> int:
        return sum(self.resource_pool.values())

    def _per_host(self) -> int:
        counts = set(self.resource_pool.values())
        if len(counts) != 1:
            raise ValueError(
                f"--launcher {self.label} needs the same number of slots on every host, not {dict(self.resource_pool)}"
                "; change the hostfile"
            )
        return counts.pop()


class OpenMPIRunner(_MPIRunner):
    """Runner with Open MPI: one mpirun, with the hostfile."""

    label, program = "openmpi", "ompi_info"

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command. TCP uses eth0 unless --launcher_args names another interface."""
        given = split(self.args.launcher_args)
        pairs = zip(given, given[1:], strict=False)
        named = any(flag in ("-mca", "--mca") and value == "btl_tcp_if_include" for flag, value in pairs)
        interface = [] if named else ["--mca", "btl_tcp_if_include", "eth0"]
        words = ["mpirun", "-n", str(self._world()), "-hostfile", str(self.args.hostfile), "--mca", "btl", "^openib"]
        exported = [word for key, value in self.exports.items() for word in ("-x", f"{key}={value}")]
        return [*words, *interface, *given, *exported, *self._python(), *self._script()]


class _HydraRunner(_MPIRunner):
    """Base class of runners that set variables with Hydra's -genv."""

    def _environment(self, more: Sequence[tuple[str, Any]]) -> list[str]:
        given = [
            *self.exports.items(),
            ("MASTER_ADDR", self.args.master_addr),
            ("MASTER_PORT", self.args.master_port),
            ("WORLD_SIZE", self._world()),
            ("LOCAL_SIZE", self._per_host()),
            *more,
        ]
        words = [word for key, value in given for word in ("-genv", key, str(value))]
        return [*words, "-hosts", ",".join(self.resource_pool)]


class MPICHRunner(_HydraRunner):
    """Runner with MPICH: one mpirun. Ranks read their rank from MPI's environment variables."""

    label = "mpich"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command."""
        words = ["mpirun", "-n", str(self._world()), "-ppn", str(self._per_host()), *split(self.args.launcher_args)]
        return [*words, *self._environment([]), *self._python(), *self._script()]


class IMPIRunner(_HydraRunner):
    """Runner with Intel MPI: one mpirun with a section for each rank."""

    label = "impi"

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command. Intel MPI's own core binding is disabled."""
        each, binds = self._per_host(), self.args.bind_cores_to_rank
        more: list[tuple[str, Any]] = [("I_MPI_PIN", 0)]
        if binds:
            more.insert(0, ("OMP_NUM_THREADS", get_numactl_cmd(self.args.bind_core_list, each, 0)[0]))
        words = ["mpirun", "-ppn", str(each), *split(self.args.launcher_args), *self._environment(more)]
        for rank in range(self._world()):
            local = rank % each
            bound = get_numactl_cmd(self.args.bind_core_list, each, local)[1] if binds else []
            words += [":"] if rank else []
            words += ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local)]
            words += [*bound, *self._python(), *self._script()]
        return words


class SlurmRunner(MultiNodeRunner):
    """Runner with Slurm: one srun."""

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> Any:
        """Return a true value if Slurm is installed."""
        return shutil.which("sinfo")

    @property
    def name(self) -> str:
        """Name "slurm"."""
        return "slurm"

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, Any]) -> None:
        """Raise ValueError unless all hosts have the same slots 0, 1, 2, ...: srun takes only their number."""
        slots = {host: _slots(given) for host, given in active_resources.items()}
        for host, given in slots.items():
            if given != list(range(len(given))):
                raise ValueError(f"slurm cannot choose slots {given} of {host}; filter whole hosts, or the first slots")
        if len({len(given) for given in slots.values()}) > 1:
            counts = {host: len(given) for host, given in slots.items()}
            raise ValueError(f"slurm needs the same number of slots on every host, not {counts}; change the hostfile")

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Return the command. srun exports the full environment.

        Raises:
            AssertionError: `--detect_nvlink_pairs` is set.
            ValueError: see `validate_active_resources`.
        """
        args = self.args
        assert not getattr(args, "detect_nvlink_pairs", False), (
            "slurm does not remap visible devices; drop --detect_nvlink_pairs"
        )
        self.validate_active_resources(active_resources)
        total = sum(len(_slots(given)) for given in active_resources.values())
        words = ["srun", "-n", str(total), *split(args.launcher_args)]
        if getattr(args, "slurm_comment", ""):
            words += ["--comment", args.slurm_comment]
        if args.include or args.exclude:
            words += ["--nodelist", ",".join(active_resources), "--nodes", str(len(active_resources))]
        if args.num_nodes > 0:
            words += ["--nodes", str(args.num_nodes)]
        if args.num_gpus > 0:
            words += ["--gpus-per-node", str(args.num_gpus)]
        exported = ",".join(["--export=ALL", *(f"{key}={value}" for key, value in self.exports.items())])
        return [*words, exported, sys.executable, "-u", *self._script()]


class MVAPICHRunner(_MPIRunner):
    """Runner with MVAPICH2-GDR: one mpirun with a generated hostfile."""

    label, program = "mvapich", "mpiname"

    def __init__(self, args: Any, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        on_cuda = {"MV2_USE_CUDA": "1"} if get_accelerator().device_name() == "cuda" else {}
        chosen = {
            "MV2_SMP_USE_CMA": "0",
            "MV2_DEBUG_SHOW_BACKTRACE": "1",
            **on_cuda,
            "MV2_SUPPORT_DL": "1",
            "MV2_ENABLE_AFFINITY": "0",
            "MV2_INTER_ALLGATHER_TUNING": "5",
            "MV2_CUDA_USE_NAIVE": "0",
        }
        for key, value in chosen.items():
            self.add_export(key, value)

    def backend_exists(self) -> bool:
        """Return True if MVAPICH2-GDR is installed; warn if it is not."""
        found = is_installed("mvapich")
        if not found:
            warnings.warn("mpiname is missing or does not name MVAPICH2-GDR; install MVAPICH2-GDR", stacklevel=2)
        return found

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Mapping[str, Any]) -> list[str]:
        """Write the hostfile and return the command."""
        each = self._per_host()
        with tempfile.NamedTemporaryFile("w", prefix="mvapich-hosts-", delete=False) as file:  # mpirun reads it later
            file.write("".join(f"{host}\n" for host in self.resource_pool))
        words = ["mpirun", "-np", str(self._world()), "-ppn", str(each), "--hostfile", file.name]
        exported = [word for key, value in self.exports.items() for word in ("-env", f"{key}={value}")]
        return [*words, *split(self.args.launcher_args), *exported, *self._python(), *self._script()]


def _quoted(word: str) -> str:
    escaped = word.replace('"', '\\"')
    return f'"{escaped}"' if " " in word else word


def _slots(given: Any) -> list[int]:
    """Return a list of slots; `given` is a list of slots, or their number."""
    return list(range(given)) if isinstance(given, int) else list(given)
