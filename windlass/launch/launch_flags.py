"""Flags of `windlass run`: those of torchrun and of the `deepspeed` command, spelled with dashes or underscores."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Sequence
from typing import Any

from windlass.base.bounded_input import MAX_HOSTS, MAX_RANKS, MAX_RANKS_PER_HOST, parse_finite_float, parse_int
from windlass.base.text import one_line

LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")
AXIS_FLAGS = {
    "pp": "stages of a pipeline",
    "dp-replicate": "groups of data ranks with copies of all states",
    "ep": "ranks over which experts are distributed",
    "sp": "ranks that share sequences",
    "tp": "ranks over which matrices are sharded",
}
"""Flags that set axis sizes, for a dry run."""
_UNBOUNDED = 10**15
_MAX_SECONDS = 2 * 10**6  # 23 days; above 2.1e6 s, `selectors` raises, as it counts ms in 32 bits
LOG_LEVEL_NAMES = ("debug", "info", "warning", "error", "critical")

_DESCRIPTION = """Start SCRIPT on N ranks of this machine, or on those of several hosts over ssh.

Each rank has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment. Ranks end with this
command, however it ends; Ctrl-C reaches each of them once. The exit code is the worst of the ranks. With
--max-restarts a run that lost ranks (a signal ended them) restarts on the remaining ones. Inside srun, mpirun or
torchrun, without a flag that places ranks, nothing is started: SCRIPT runs as the rank that this process is.

Every flag of torchrun and of the `deepspeed` command is known; an unsupported one is refused by name.
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, prefix or "Usage: ")


def build_run_parser() -> argparse.ArgumentParser:
    """Build the parser of `windlass run`, for `parse_flags`."""
    parser = argparse.ArgumentParser(
        prog="windlass run",
        usage="windlass run [OPTION]... SCRIPT [ARGUMENT]...",
        description=_DESCRIPTION,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    _add_program_flags(parser)
    _add_placement_flags(parser)
    _add_host_flags(parser)
    _add_rendezvous_flags(parser)
    _add_failure_flags(parser)
    _add_output_flags(parser)
    _add_core_binding_flags(parser)
    _add_tuning_flags(parser)
    _add_dry_run_flags(parser)
    _add_refused_flags(parser)
    return parser


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags before the first word that is not a flag. The remaining words become `words` of the result.

    argparse alone would consume a `--` that belongs to the script, and take a value that begins with `-` for a flag.
    """
    flags, rest = [], list(argv)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        if _takes_next_word(parser, word) and rest:
            value = rest.pop(0)
            flags += [f"{word}={value}"] if word.startswith("--") else [word, value]
        else:
            flags.append(word)
    args = parser.parse_args(flags)
    args.words = rest[1:] if rest[:1] == ["--"] else rest
    if not args.words and not getattr(args, "dry_run", False):
        parser.error("nothing to run: name a script, or a module with --module")
    return args


def int_between(minimum: int = -_UNBOUNDED, maximum: int = _UNBOUNDED) -> Callable[[str], int]:
    """Return a parser of whole numbers within bounds, for argparse."""

    def whole_number_of(text: str) -> int:
        value = parse_int(text)
        if value is None or not minimum <= value <= maximum:
            bounds = f" from {minimum:,} to {maximum:,}" if maximum < _UNBOUNDED else ""
            raise argparse.ArgumentTypeError(f"{one_line(text, 60)!r} is not a whole number{bounds}")
        return value

    return whole_number_of


def seconds_at_least(minimum: float) -> Callable[[str], float]:
    """Return a parser of durations in seconds, for argparse."""

    def seconds_of(text: str) -> float:
        value = parse_finite_float(text)
        if value is None or not minimum <= value <= _MAX_SECONDS:
            raise argparse.ArgumentTypeError(
                f"{one_line(text, 60)!r} is not a number of seconds from {minimum:g} to {_MAX_SECONDS:,}"
            )
        return value

    return seconds_of


def add_flag(group: Any, *names: str, **settings: Any) -> None:
    """Add a flag under each of its names, spelled with dashes and with underscores."""
    every = []
    for name in names:
        every += (
            [name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_")] if "--" in name else [name]
        )
    group.add_argument(*dict.fromkeys(every), **settings)


def _add_program_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("program to run")
    add_flag(group, "-m", "--module", action="store_true", help="SCRIPT names a module, as in python -m")
    add_flag(group, "--no-python", action="store_true", help="SCRIPT is a program, executed as it is")
    add_flag(group, "--run-path", action="store_true", help="SCRIPT, an absolute path, runs through runpy.run_path")
    add_flag(
        group, "--no-local-rank", action="store_true", help="SCRIPT gets no --local_rank=N; here it never gets one"
    )


def _add_placement_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    text = "ranks on each host: a number, gpu, cpu (cores), auto (GPUs, else cores) [one for each GPU, else 1]"
    add_flag(group, "-n", "--nproc", "--nproc_per_node", metavar="N", help=text)
    text = "devices on each host, the first N; as many CPU ranks if it has no devices"
    add_flag(
        group,
        "--num_gpus",
        "--num_accelerators",
        type=int_between(-1, MAX_RANKS_PER_HOST),
        default=-1,
        metavar="N",
        help=text,
    )
    for name, what in (
        ("--servers", "parameter servers, the first ranks"),
        ("--replicas", "replicas of each parameter server, the ranks after the servers"),
        ("--workers", "workers of parameter servers"),
    ):
        add_flag(group, name, type=int_between(0, MAX_RANKS_PER_HOST), default=0, metavar="N", help=f"{what} [none]")
    text = "hosts: the first N of the hostfile, else those that run this command; MIN:MAX needs a rendezvous"
    add_flag(group, "--nnodes", metavar="N", help=text)
    add_flag(
        group,
        "--num_nodes",
        type=int_between(-1, MAX_HOSTS),
        default=-1,
        metavar="N",
        help="hosts: the first N of the hostfile",
    )
    add_flag(
        group,
        "--node_rank",
        type=int_between(-1, MAX_HOSTS),
        default=-1,
        metavar="K",
        help="index of this host, with --nnodes or --no_ssh",
    )
    add_flag(group, "--master_addr", metavar="HOST", help="rendezvous address [the first host]")
    add_flag(
        group,
        "--master_port",
        type=int_between(),
        metavar="PORT",
        help="rendezvous port [a free one; 29500 if hosts start by themselves]",
    )
    add_flag(group, "--local_addr", metavar="HOST", help="address of this host; only with a rendezvous")
    add_flag(group, "--role", default="default", help="ROLE_NAME in the ranks' environment [default]")
    text = "each rank has LOCAL_RANK 0 and sees only its own device"
    add_flag(group, "--virtual_local_rank", action="store_true", help=text)


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts")
    add_flag(
        group, "-H", "--hostfile", metavar="FILE", help="lines HOST slots=N [none; `deepspeed` looks at /job/hostfile]"
    )
    text = "hosts and slots to use: NAME[:SLOT[,SLOT...]][@NAME...]"
    add_flag(group, "-i", "--include", default="", metavar="FILTER", help=text)
    add_flag(group, "-e", "--exclude", default="", metavar="FILTER", help="hosts and slots to leave out, likewise")
    text = f"how other hosts are reached: {', '.join(LAUNCHERS)} [ssh: plain, without pdsh]"
    add_flag(group, "--launcher", metavar="NAME", help=text)
    add_flag(
        group, "--launcher_args", default="", metavar="TEXT", help="more options of ssh, pdsh, mpirun or srun, one text"
    )
    add_flag(group, "--ssh_port", type=int_between(1, 65_535), metavar="PORT", help="port of ssh and pdsh")
    add_flag(group, "--venv_script", metavar="FILE", help="script sourced first on each host; for ssh and pdsh")
    add_flag(group, "--no_ssh", action="store_true", help="this command runs on every host by itself, with --node_rank")
    add_flag(
        group,
        "--no_ssh_check",
        action="store_true",
        help="skip the check of hosts; here the connection is the only check",
    )
    add_flag(group, "--force_multi", action="store_true", help="use ssh (or --launcher) even for one host")


def _add_rendezvous_flags(parser: argparse.ArgumentParser) -> None:
    text = "hosts find each other by torch's elastic agent, which then starts the ranks: no labels, no files"
    group = parser.add_argument_group("rendezvous", text)
    add_flag(group, "--rdzv_backend", metavar="NAME", help="c10d, etcd-v2, ..., or static [static]")
    add_flag(group, "--rdzv_endpoint", metavar="HOST:PORT", help="with static: --master_addr and --master_port")
    add_flag(group, "--rdzv_id", metavar="NAME", help="name of the run")
    add_flag(group, "--rdzv_conf", metavar="K=V,...", help="further options of the rendezvous")
    add_flag(
        group, "--standalone", action="store_true", help="only this machine, at a free port: same as without the flag"
    )


def _add_failure_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ends")
    text = "maximum number of restarts after a failure, without the lost ranks [0]"
    add_flag(group, "--max-restarts", type=int_between(), default=0, metavar="K", help=text)
    add_flag(
        group,
        "--min-nproc",
        type=int_between(),
        default=1,
        metavar="N",
        help="minimum number of ranks for a restart [1]",
    )
    text = "seconds for ranks to end after Ctrl-C or another rank's failure, before they are killed [7]"
    add_flag(group, "--grace", "--shutdown_timeout", type=seconds_at_least(0), default=7.0, metavar="S", help=text)
    text = "signals that are forwarded to ranks [SIGTERM,SIGINT,SIGHUP,SIGQUIT]"
    add_flag(group, "--signals_to_handle", metavar="NAME,...", help=text)
    text = "seconds between two checks of the ranks [0.1]"
    add_flag(group, "--monitor_interval", type=seconds_at_least(0.001), default=0.1, metavar="S", help=text)
    text = "write the pid of this process to /tmp/PID.deepspeed while it runs"
    add_flag(group, "--save_pid", action="store_true", help=text)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    text = "one file per rank, DIR/rankN.log, beside the console; on this machine, for ranks of all hosts"
    add_flag(group, "--log-dir", metavar="DIR", help=text)
    text = "streams that go only to the files: 0 none, 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:THAT,... [0]"
    add_flag(group, "-r", "--redirects", metavar="STD", help=text)
    text = "streams that go to the files and the console, likewise [3 with --log-dir]"
    add_flag(group, "-t", "--tee", metavar="STD", help=text)
    add_flag(group, "--local_ranks_filter", metavar="N,...", help="show only these local ranks")
    text = "files DIR/TIME_rankN.log instead of the console, as `deepspeed` writes them"
    add_flag(group, "--enable_each_rank_log", default="None", metavar="DIR", help=text)
    text = "begin each line with its rank [with more than one rank]"
    group.add_argument("--labels", action=argparse.BooleanOptionalAction, default=None, help=text)
    add_flag(
        group,
        "--watch",
        action="store_true",
        help="a live table of the ranks; lines of text without a terminal",
    )
    add_flag(
        group,
        "--log_level",
        choices=LOG_LEVEL_NAMES,
        metavar="LEVEL",
        help=f"log level of this command: {', '.join(LOG_LEVEL_NAMES)} [info]",
    )
    add_flag(group, "-q", "--quiet", action="store_true", help="same as --log_level error")


def _add_core_binding_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cores")
    text = "bind each rank to an equal share of the cores, and set OMP_NUM_THREADS to their number; needs no numactl"
    add_flag(group, "--bind_cores_to_rank", action="store_true", help=text)
    text = "the cores to use: 1,3-5,7 [one thread of each core]"
    add_flag(group, "--bind_core_list", metavar="LIST", help=text)


def _add_tuning_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tuning")
    text = "search the fastest configuration as the section `autotuning` asks (tune), and start SCRIPT with it (run)"
    add_flag(group, "--autotuning", choices=["tune", "run"], metavar="MODE", help=text)


def _add_dry_run_flags(parser: argparse.ArgumentParser) -> None:
    text = "print the placement of ranks and the traffic of each mesh axis in a step; nothing is started"
    group = parser.add_argument_group("dry run", text)
    add_flag(group, "--dry-run", action="store_true", help="print that, and exit; SCRIPT is not needed")
    add_flag(group, "--config", metavar="FILE", help="with --dry-run: the configuration that sets the axes")
    for axis, words in AXIS_FLAGS.items():
        add_flag(group, f"--{axis}", type=int_between(-1, MAX_RANKS), metavar="N", help=f"or these sizes: {words} [1]")
    text = "shape of the model: 7b, 70b, 8x7b, a config.json of transformers, or hidden=4096,layers=32,... [7b]"
    add_flag(group, "--shape", metavar="MODEL", help=text)
    text = "tokens in a micro-batch of one data-loading rank: samples x sequence length [4096]"
    add_flag(group, "--tokens", type=int_between(), metavar="N", help=text)


def _add_refused_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("known and refused")
    text = "only spawn, because ranks are programs"
    add_flag(
        group, "--start_method", choices=["spawn", "fork", "forkserver"], default="spawn", metavar="spawn", help=text
    )
    add_flag(group, "--event_log_handler", default="null", metavar="null", help="only with a rendezvous")
    add_flag(group, "--logs_specs", metavar="NAME", help="only with a rendezvous")
    add_flag(group, "--numa_binding", metavar="MODE", help="only with a rendezvous; use --bind_cores_to_rank")
    for name in ("--duplicate_stdout_filters", "--duplicate_stderr_filters"):
        add_flag(group, name, metavar="TEXT", help="only with a rendezvous; use --log-dir")
    text = "removed from DeepSpeed too; use --max-restarts"
    add_flag(group, "--elastic_training", action="store_true", help=text)
    add_flag(group, "--min_elastic_nodes", "--max_elastic_nodes", type=int_between(), metavar="N", help=text)


def _takes_next_word(parser: argparse.ArgumentParser, word: str) -> bool:
    actions = parser._option_string_actions
    if "=" in word and word.startswith("--"):
        return False
    if word in actions:
        return actions[word].nargs is None
    if word.startswith("--"):
        found = {id(one): one for name, one in actions.items() if parser.allow_abbrev and name.startswith(word)}
        return len(found) == 1 and next(iter(found.values())).nargs is None
    for position, letter in enumerate(word[1:], 1):  # combined short flags, such as -mq and -n2
        action = actions.get(f"-{letter}")
        if action is None:
            return False
        if action.nargs is None:
            return position == len(word) - 1
    return False


def copy_flags(parser: argparse.ArgumentParser, names: Container[str]) -> None:
    """Add the flags `names` of `windlass run` to `parser`, without the short form `-m`. Set defaults of all others.

    Args:
        names: names of the flags as attributes of the parsed arguments, such as `num_gpus`.
    """
    for action in build_run_parser()._actions:
        if action.dest == "help":
            continue
        if action.dest in names:
            action.option_strings = [name for name in action.option_strings if name != "-m"]
            parser._add_action(action)
        else:
            parser.set_defaults(**{action.dest: action.default})
