"""Tests that every flag of torchrun and `deepspeed` is known, and that an unsupported one is refused by name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from windlass.compat import deepspeed_command
from windlass.compat.deepspeed_command import build_deepspeed_parser
from windlass.compat.deepspeed_node_command import build_node_parser, node_plan_from_args
from windlass.launch import launch_command, plan_from_flags, torch_agent
from windlass.launch.exit_status import LaunchExitStatus
from windlass.launch.hostfile import encode_world_info
from windlass.launch.launch_errors import LaunchError
from windlass.launch.launch_flags import AXIS_FLAGS, build_run_parser, parse_flags
from windlass.launch.launch_plan import LaunchPlan
from windlass.launch.plan_from_flags import (
    has_placement_flags,
    needs_rendezvous,
    plan_from_args,
    reject_unsupported_flags,
)
from windlass.launch.program import Program
from windlass.launch.rank_placement import Host

_OF_DEEPSPEED = {
    *(
        "-H",
        "-i",
        "-e",
        "-q",
        "--hostfile",
        "--include",
        "--exclude",
        "--num_nodes",
        "--num_gpus",
        "--num_accelerators",
    ),
    *("--master_port", "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--module", "--no_python"),
    *("--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--enable_each_rank_log"),
    *("--autotuning", "--bind_cores_to_rank", "--bind_core_list", "--ssh_port", "--venv_script", "--log_level"),
    *("--quiet", "--elastic_training", "--min_elastic_nodes", "--max_elastic_nodes"),
}


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI")) or name == "LOCAL_SIZE"]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(plan_from_flags, "count_devices", lambda: 0)


def flags(*words: str) -> argparse.Namespace:
    return parse_flags(build_run_parser(), [*words, "script.py"])


def planned(*words: str) -> LaunchPlan:
    args = flags(*words)
    reject_unsupported_flags(args)
    return plan_from_args(args, {})


def test_every_flag_of_torchrun_and_deepspeed_is_known() -> None:
    from torch.distributed.run import get_args_parser

    known = build_run_parser()._option_string_actions
    torchruns = get_args_parser()._option_string_actions
    assert not {*torchruns, *_OF_DEEPSPEED} - set(known)
    for name, action in torchruns.items():
        assert (action.nargs == 0) == (known[name].nargs == 0), f"{name} takes a value in one of them only"
    assert not _OF_DEEPSPEED - set(build_deepspeed_parser()._option_string_actions)
    for name in known:
        if name.startswith("--") and name not in ("--labels", "--no-labels"):
            assert "--" + name[2:].replace("-", "_") in known and "--" + name[2:].replace("_", "-") in known


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["s", "--nproc", "x", "-h"], ["s", "--nproc", "x", "-h"]),
        (["-n", "2", "s", "--", "x"], ["s", "--", "x"]),
        (["-n2", "--", "s", "--", "x"], ["s", "--", "x"]),
        (["-qm", "mod", "-m"], ["mod", "-m"]),
        (["-qn", "2", "s"], ["s"]),
        (["--nproc=2", "--master-port", "9", "s", ""], ["s", ""]),
        (["--launcher_args=-x", "s"], ["s"]),
        (["--launcher_args", "-F a", "-q", "s"], ["s"]),
        (["--launcher_args", "--oversubscribe", "s"], ["s"]),
        (["-"], ["-"]),
    ],
)
def test_script_arguments_are_separated(words: list[str], script: list[str]) -> None:
    assert parse_flags(build_run_parser(), words).words == script


def test_deepspeed_flags_may_be_abbreviated() -> None:
    args = deepspeed_command.parse_args(["--num_gp", "3", "--hostf=none", "--no_local", "s", "--num_gp", "4"])
    assert (args.num_gpus, args.hostfile, args.no_local_rank, args.master_port) == (3, "none", True, 29500)
    assert args.words == ["s", "--num_gp", "4"]
    assert parse_flags(build_deepspeed_parser(), ["s"]).hostfile == "/job/hostfile"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--start-method", "fork"], "--start_method fork"),
        (["--elastic_training"], "use --max-restarts K"),
        (["--max_elastic_nodes", "4"], "use --max-restarts K"),
        (["--local-addr", "a"], "--local_addr only applies to torch's rendezvous"),
        (["--numa-binding", "node"], "--numa_binding only applies"),
        (["--logs-specs", "a"], "--logs_specs only applies"),
        (["--duplicate-stdout-filters", "a"], "--duplicate_stdout_filters only applies"),
        (["--event-log-handler", "console"], "--event_log_handler only applies"),
        (["--rdzv-id", "a"], "--rdzv_id needs --rdzv_backend"),
        (["--bind_core_list", "0"], "--bind_core_list needs --bind_cores_to_rank"),
        (["--module", "--no-python"], "--module and --no_python together"),
        (["--run-path"], "--run_path script.py: give an absolute path"),
        (["--nproc", "0"], "--nproc is 0; at least one is needed"),
        (["--nproc", "-2"], "--nproc is -2; at least one is needed"),
        (["--nproc", "many"], "--nproc many is neither a number nor gpu, cpu or auto"),
        (["--nproc", "gpu"], "--nproc gpu, and this machine has no GPU"),
        (["--nproc", "2", "--num_gpus", "2"], "--num_gpus and --nproc together"),
        (["--num_gpus", "0"], "--num_gpus 0 leaves no rank"),
        (["--num_nodes", "2"], "--num_nodes 2 and no hostfile"),
        (["--nnodes", "2", "--num_nodes", "2"], "--num_nodes and --nnodes together"),
        (["--nnodes", "2", "--standalone"], "--standalone is one machine, --nnodes is 2"),
        (["--include", "a:0", "--num_gpus", "1"], "--include or --exclude with a number"),
        (["--include", "a:0"], "host 'a' is not in the hostfile"),
        (["--exclude", "localhost:0"], "--exclude localhost:0 leaves no slot"),
        (["--master-port", "65536"], "--master-port 65536 is not a port"),
        (["--launcher", "slurm"], "--launcher slurm outside of a job"),
        (["--signals_to_handle", "SIGNONE"], "'SIGNONE' is not a signal"),
        (["--signals_to_handle", "SIGTERM,SIGKILL"], "no process can handle SIGKILL"),
    ],
)
def test_unsupported_flags_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        planned(*words)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--launcher", "telnet"], "--launcher telnet is unknown; choose one of ssh, pdsh"),
        (["--launcher_args", "x"], "--launcher_args applies to other hosts"),
        (["--ssh_port", "22"], "--ssh_port applies to other hosts"),
        (["--node_rank", "1"], "--node_rank 1 of one node"),
        (["--launcher", "Pdsh"], "--launcher Pdsh starts ranks on other hosts, and no hostfile names any"),
        (["--signals_to_handle", "SIGTERM,SIGNOT"], "'SIGNOT' is not a signal of this system"),
        (["--nnodes", "2"], "--node_rank is -1; give each of the 2 hosts its number, 0 to 1"),
        (["--nnodes", "2", "--node_rank", "0", "--max-restarts", "1"], "if each host is started separately"),
        (["--redirects", "3"], "--redirects needs --log-dir DIR"),
        (["--log-dir", "x", "--tee", "4"], "--tee 4: write 0, 1 (stdout)"),
        (["--enable_each_rank_log", "x", "--log-dir", "y"], "--enable_each_rank_log and --log_dir together"),
        (["--standalone", "--rdzv-id", "1"], "--standalone with --rdzv_id"),
        (["--rdzv-backend", "c10d", "--watch"], "--watch cannot be combined with a rendezvous"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
    ],
)
def test_invalid_combinations_are_refused_before_any_start(words: list[str], message: str) -> None:
    args = parse_flags(build_run_parser(), [*words, __file__])
    with pytest.raises(LaunchError) as caught:
        launch_command.launch_from_args(args)
    assert message in str(caught.value)


@pytest.mark.parametrize(("launcher", "missing"), [("openmpi", "ompi_info"), ("mpich", "mpirun")])
def test_an_mpi_in_no_folder_of_path_is_refused_by_its_program(
    launcher: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `mpirun` of another MPI does not count as Open MPI, and the message names the program that is missing."""
    if launcher == "openmpi":
        (tmp_path / "mpirun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    args = parse_flags(build_run_parser(), ["--launcher", launcher, "--nproc", "2", __file__])
    with pytest.raises(LaunchError, match=f"--launcher {launcher}: {missing} is in no folder of PATH; activate the"):
        launch_command.launch_from_args(args)


def test_local_ranks_from_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned().hosts == (Host("localhost", (0,)),)
    assert planned("--nproc", "3").hosts == (Host("localhost", (0, 1, 2)),)
    assert planned("--num_gpus", "2").hosts[0].slots == (0, 1)
    assert (
        planned("--nproc-per-node", "cpu").world_size == os.cpu_count() == planned("--nproc_per_node=auto").world_size
    )
    assert planned("--include", "localhost:0,2").world_size == 2
    monkeypatch.setenv("LOCAL_SIZE", "3")
    assert planned().world_size == 3 and planned("--exclude", "localhost:0").hosts[0].slots == ("1", "2")
    monkeypatch.setattr(plan_from_flags, "count_devices", lambda: 4)
    assert planned().world_size == planned("--nproc", "gpu").world_size == planned("--nproc", "auto").world_size == 4
    assert planned("--exclude", "localhost:1").hosts[0].slots == ("0", "2", "3")
    monkeypatch.setattr(plan_from_flags, "count_devices", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4")
    assert planned().world_size == 2 and not planned("--nproc", "5").use_devices
    assert planned("--include", "localhost:4").hosts[0].slots == ("4",)
    assert planned("--num_gpus", "1").use_devices
    for words in (("--num_gpus", "3"), ("--include", "localhost:0")):
        with pytest.raises(LaunchError, match="this machine has 2|no slot 0; there are 6,4"):
            planned(*words)


def test_devices_that_slurm_gives_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.launch.visible_devices.count_devices", lambda: 8)
    monkeypatch.setattr(plan_from_flags, "count_devices", lambda: 8)
    monkeypatch.setenv("SLURM_STEP_GPUS", "2,5")
    assert planned().env == {"CUDA_VISIBLE_DEVICES": "2,5"} and planned().world_size == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert planned().env == {}


def test_hosts_from_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\nc slots=1\n")
    hostfile = ("-H", str(tmp_path / "hosts"))
    assert planned(*hostfile).hosts == (Host("a", (0, 1)), Host("b", (0, 1, 2, 3)), Host("c", (0,)))
    assert planned(*hostfile, "--include", "c@b:1,3").hosts == (Host("b", (1, 3)), Host("c", (0,)))
    two = (Host("a", (0, 1)), Host("b", (0, 1)))
    assert planned(*hostfile, "--num_nodes", "2", "--num_gpus", "2").hosts == two
    assert planned(*hostfile, "--nnodes", "2", "--nproc", "2").hosts == two
    with pytest.raises(LaunchError, match="--nproc gpu with a hostfile"):
        planned(*hostfile, "--nproc", "gpu")


def test_node_rank_flags() -> None:
    plan = planned("--nnodes", "2", "--nproc", "2", "--rdzv-endpoint", "host:123", "--role", "trainer")
    assert (plan.world_size, plan.master_addr, plan.master_port, plan.role) == (4, "host", 123, "trainer")
    assert not needs_rendezvous(flags("--nnodes", "2:2")) and needs_rendezvous(flags("--nnodes", "1:2"))
    assert needs_rendezvous(flags("--rdzv-backend", "c10d")) and not needs_rendezvous(flags("--rdzv-backend", "static"))
    assert not needs_rendezvous(flags("--standalone"))


_REFUSED_WITH_A_RENDEZVOUS = {
    **{name: ["1"] for name in ("num_nodes", "ssh_port", "servers", "replicas", "workers", "min_elastic_nodes")},
    **{name: ["x"] for name in ("hostfile", "include", "exclude", "launcher", "launcher_args", "venv_script")},
    **{name: [] for name in ("no_ssh", "force_multi", "watch", "labels", "save_pid", "elastic_training")},
    **{"bind_cores_to_rank": [], "bind_core_list": ["0"], "enable_each_rank_log": ["x"], "min_nproc": ["2"]},
}


@pytest.mark.parametrize("name", torch_agent.UNSUPPORTED_FLAGS)
def test_flags_refused_with_a_rendezvous(name: str) -> None:
    args = flags("--nnodes", "1:2", "--rdzv-backend", "c10d", f"--{name}", *_REFUSED_WITH_A_RENDEZVOUS[name])
    assert needs_rendezvous(args)
    with pytest.raises(LaunchError, match=f"--{name} cannot be combined with a rendezvous"):
        torch_agent.start_with_torch_agent(args, Program(("script.py",)), {})


def test_every_flag_is_passed_on_or_refused_with_a_rendezvous() -> None:
    before = {"autotuning", "dry_run", "config", *(name.replace("-", "_") for name in AXIS_FLAGS), "shape", "tokens"}
    ours = {"module", "no_python", "run_path", "no_local_rank", "nproc", "num_gpus", "grace", "log_level", "quiet"}
    without_effect = {"help", "node_rank", "no_ssh_check", "standalone"}
    known = {*torch_agent.TORCHRUN_FLAGS, *torch_agent.UNSUPPORTED_FLAGS, *before, *ours, *without_effect}
    assert {action.dest for action in build_run_parser()._actions} == known


def test_placement_flags_are_detected() -> None:
    assert not has_placement_flags(flags("-q", "--max-restarts", "2", "--module"))
    for words in (("-n", "1"), ("--num_gpus", "1"), ("--standalone",), ("--nnodes", "1"), ("-H", "x"), ("-i", "a")):
        assert has_placement_flags(flags(*words)), words


def test_deepspeeds_own_entry_raises_what_its_tests_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ("--num_nodes 1 -i localhost", "--num_gpus 1 -e localhost", "--num_nodes 2", "-i a -e b", "-i nobody"):
        with pytest.raises(ValueError):
            deepspeed_command.run([*words.split(), "foo.py"])


def test_per_host_launcher_flags() -> None:
    """`python -m deepspeed.launcher.launch`, which schedulers call directly, takes the hosts from its caller."""
    results = encode_world_info({"a": [0, 1], "b": [0, 3]})
    words = [
        f"--world_info={results}",
        "--node_rank",
        "1",
        "--master_addr",
        "m",
        "--master_port=7",
        "s.py",
        "--node_rank",
    ]
    plan = node_plan_from_args(parse_flags(build_node_parser(), words))
    assert [(place.rank, place.local_rank, place.host) for place in plan.rank_placements(plan.node_rank)] == [
        (2, 0, "b"),
        (3, 1, "b"),
    ]
    assert (plan.master_addr, plan.master_port, plan.use_agent_store, plan.use_devices) == ("m", 7, False, True)
    assert plan.program.argv_for_rank(1)[-3:] == ["s.py", "--local_rank=1", "--node_rank"]
    for wrong, words_of_it in (
        (["--world_info=None"], "not base64 of"),
        ([f"--world_info={results}", "--node_rank=2"], "has no slots for this host"),
        ([f"--world_info={encode_world_info({'a': 2})}"], "not base64 of"),
    ):
        with pytest.raises(LaunchError, match=words_of_it):
            node_plan_from_args(parse_flags(build_node_parser(), [*wrong, "s.py"]))


def test_busy_default_port_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy default port is replaced, so that two `deepspeed` commands can run on one machine."""
    plans: list[LaunchPlan] = []
    monkeypatch.setattr(launch_command, "is_port_free", lambda port: False)
    monkeypatch.setattr(
        launch_command, "start_local_ranks", lambda plan, events: plans.append(plan) or LaunchExitStatus(0)
    )
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    deepspeed_command.run(["--hostfile", "none", __file__])
    deepspeed_command.run(["--hostfile", "none", "--master_port", "29500", __file__])
    assert [plan.master_port for plan in plans] == [None, 29500]


def test_the_parsed_command_names_script_and_arguments() -> None:
    args = deepspeed_command.parse_args(["--num_gpus", "2", "--launcher_arg", "-x y", "s.py", "--num_gpus", "3"])
    assert (args.user_script, args.user_args, args.num_gpus, args.launcher_args) == (
        "s.py",
        ["--num_gpus", "3"],
        2,
        "-x y",
    )
