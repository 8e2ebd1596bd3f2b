"""Tests of ranks on several hosts over ssh: they train, and no process remains on any host however a run ends."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.quick_rows import in_shares
from tests.dist.test_one_bit_adam import one_thread  # noqa: F401 - a fixture
from tests.dist.test_quantized_messages import Case, all_of, assert_equals_simulation
from tests.process.namespaced_hosts import Machines, why_not
from tests.process.wait_until import is_alive, until
from windlass.launch.agent_channel import KEEPALIVE_TIMEOUT_S

_WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("machines"), 3)
    yield made
    made.close()


class Launched:
    """`windlass run` on some hosts, started on the hub. `folder` is the working directory of ranks and launcher."""

    def __init__(
        self, machines: Machines, folder: Path, source: str, *words: str, options: tuple[str, ...] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        (folder / "script.py").write_text(source)
        ours = [] if "--launcher" in options else ["--launcher_args", f"-F {machines.config}"]
        flags = ["--hostfile", str(machines.hostfile), *ours, *options]
        command = [*machines.inside("hub"), sys.executable, "-m", "windlass", "run", *flags, "script.py", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
        environment["PDSH_SSH_ARGS_APPEND"] = f"-F {machines.config}"
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, env=environment)

    def wait(self, seconds: float = 120) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(20)
            raise

    def pids(self, kind: str) -> dict[int, int]:
        """Return the process ids of ranks, of their agents, or of the ranks' children."""
        result = self.folder.glob(f"{kind}.[0-9]")
        return {int(path.suffix[1:]): int(text) for path in result if (text := path.read_text())}

    def everything(self) -> list[int]:
        return [pid for kind in ("rank", "agent", "child") for pid in self.pids(kind).values()]


SLEEPS = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank = os.environ["RANK"]
if "stubborn" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
for kind, pid in (("child", child.pid), ("agent", os.getppid()), ("rank", os.getpid())):
    Path(f"{kind}.{rank}.part").write_text(str(pid))
    Path(f"{kind}.{rank}.part").rename(f"{kind}.{rank}")
print("last words of", rank, file=sys.stderr)
if "fails" in sys.argv and rank == "1":
    while not Path("go").exists():
        time.sleep(0.05)
    raise ValueError("one rank is unwell")
time.sleep(600)
"""


@dataclass
class Way:
    """End of a run: the action that causes it, its exit code and its message."""

    act: Callable[[Launched, Machines], None]
    code: int
    said: str
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ("--include", "node-0@node-1")


def _to_launcher(number: signal.Signals) -> Callable[[Launched, Machines], None]:
    return lambda launched, machines: launched.process.send_signal(number)


def _to(kind: str) -> Callable[[Launched, Machines], None]:
    return lambda launched, machines: os.kill(launched.pids(kind)[1], signal.SIGKILL)


WAYS = {
    "ctrl-c": Way(_to_launcher(signal.SIGINT), 130, "windlass run: stopped by SIGINT, all ranks have ended"),
    "term": Way(_to_launcher(signal.SIGTERM), 143, "windlass run: stopped by SIGTERM, all ranks have ended"),
    "stubborn": Way(
        *(_to_launcher(signal.SIGINT), 130, "windlass run: stopped by SIGINT, all ranks have ended"),
        words=("stubborn",),
    ),
    "launcher": Way(_to_launcher(signal.SIGKILL), -9, ""),
    "rank": Way(_to("rank"), 137, "windlass run: rank 1 on node-1 was ended by SIGKILL"),
    "agent": Way(_to("agent"), 137, "windlass run: node-1 was lost with rank 1: its connection ended"),
    "fails": Way(
        *(lambda launched, machines: (launched.folder / "go").touch(), 1, "  ValueError: one rank is unwell"),
        words=("fails",),
    ),
    "node": Way(
        *(lambda launched, machines: machines.cut(2), 137, "windlass run: node-2 was lost with rank 1: "),
        options=("--include", "node-0@node-2"),
    ),
}


@in_shares
def test_every_exit_ends_all_processes_on_all_hosts(machines: Machines, tmp_path: Path, every: bool) -> None:
    """All runs start at once, since most of them wait. `make test` leaves out three ends that resemble others."""
    ways = {name: way for name, way in WAYS.items() if every or name not in ("ctrl-c", "term", "agent")}
    runs = {
        name: Launched(machines, tmp_path / name, SLEEPS, *way.words, options=way.options) for name, way in ways.items()
    }
    try:
        until(lambda: all(len(run.pids("rank")) == 2 for run in runs.values()), "ranks start")
        spoken = [f"[rank {rank} node-".encode() for rank in (0, 1)]
        until(lambda: all(item in run.err.read_bytes() for run in runs.values() for item in spoken), "ranks are heard")
        for name, way in ways.items():
            way.act(runs[name], machines)
        for name, run in runs.items():
            until(lambda run=run: run.process.poll() is not None, f"the launcher of {name} ends")
            until(lambda run=run: not any(map(is_alive, run.everything())), f"all of {name} end")
    finally:
        for run in runs.values():
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
            for pid in filter(is_alive, run.everything()):
                os.kill(pid, signal.SIGKILL)
    for name, way in ways.items():
        text = runs[name].err.read_text()
        assert runs[name].process.returncode == way.code, (name, text)
        assert way.said in text, (name, text)
        assert "[rank 1 node-" in text, (name, text)
    assert "the last lines of rank 1:\n  last words of 1\n" in runs["rank"].err.read_text()


TELLS = """
import json, os, sys
from pathlib import Path
names = [*"RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE CROSS_RANK MASTER_ADDR".split(), "HOSTILE", "NOT_EXPORTED"]
report = {"arguments": sys.argv[1:], "here": os.getcwd(), **{name: os.environ.get(name) for name in names}}
Path(f"tells.{os.environ['RANK']}").write_text(json.dumps(report))
print("one", "two", sep="\\n")
"""
HOSTILE = [
    "a b",
    "'",
    '"',
    "$HOME",
    "$(id)",
    "`id`",
    ";",
    "a\nb",
    "\\",
    "\\n",
    "é☃",
    "",
    "*",
    "-x",
    "!x",
    "%n",
    "#",
    "~",
]


def test_arguments_and_environment_are_forwarded_unchanged(machines: Machines, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $HOME; "a"'
    folder.mkdir()
    value = " $HOME '\" ; \\ é☃ %n `id`"
    (folder / ".deepspeed_env").write_text(f"HOSTILE=x{value}x\n# a comment\n\n")
    options = ("--include", "node-0@node-1", "--log-dir", "logs")
    run = Launched(machines, folder, TELLS, *HOSTILE, options=options)
    assert run.wait() == 0, run.err.read_text()
    for rank in (0, 1):
        result = json.loads((folder / f"tells.{rank}").read_text())
        assert result.pop("here") == str(folder)
        assert result == {
            "arguments": HOSTILE,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "CROSS_RANK": str(rank),
            "MASTER_ADDR": machines.address(0),
            "HOSTILE": f"x{value}x",
            "NOT_EXPORTED": None,
        }
        assert (folder / "logs" / f"rank{rank}.log").read_text() == "one\ntwo\n"
        lines = [line for line in run.out.read_text().splitlines() if line.startswith(f"[rank {rank} node-{rank}] ")]
        assert [line.split("] ")[1] for line in lines] == ["one", "two"]


def test_unusable_hosts_are_named(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node-0 slots=1\nnobody slots=1\n")
    unknown = Launched(machines, tmp_path / "unknown", TELLS, options=("--hostfile", str(tmp_path / "hosts")))
    missing = Launched(machines, tmp_path / "missing", TELLS, options=("--include", "node-1", "--run-path"))
    assert unknown.wait() == 1
    text = unknown.err.read_text()
    assert text.startswith("windlass: nobody cannot be reached: its connection ended (ssh: "), text
    assert not (tmp_path / "unknown" / "tells.0").exists()
    assert missing.wait() == 1
    assert "--run_path script.py: give an absolute path" in missing.err.read_text()


TRAINS = """
import json, os, sys
import torch, torch.distributed as dist, windlass
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 1))
config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
          "zero_optimization": {"stage": 2}}
engine, *_ = windlass.initialize(model=model, config=config)
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(4):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    y = x.prod(dim=1, keepdim=True)
    loss = torch.nn.functional.mse_loss(engine(x[rank::size]), y[rank::size])
    engine.backward(loss)
    engine.step()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    if rank == 0:
        print(json.dumps([size, loss.item() / size]))
"""


def plain_losses() -> list[float]:
    """Return the losses of the same training in plain PyTorch."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 1))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.prod(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the default of gradient_clipping
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_hosts_train_equal_to_one(machines: Machines, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=wl0\n")
    two = Launched(machines, folder, TRAINS, options=("--include", "node-0@node-1"))
    assert two.wait() == 0, two.err.read_text()
    results = [json.loads(line.partition("] ")[2]) for line in two.out.read_text().splitlines() if "[2, " in line]
    assert [size for size, _ in results] == [2] * 4
    assert [loss for _, loss in results] == pytest.approx(plain_losses(), rel=1e-4)


ZEROPP = """
import os, pickle
import torch, torch.distributed as dist, windlass
from tests.dist.test_quantized_messages import run_case
assert os.environ["LOCAL_WORLD_SIZE"] == "2"
torch.set_num_threads(1)
windlass.init_distributed("gloo")
with open("cases", "rb") as file:
    found = [run_case(case) for case in pickle.load(file)]
with open(f"found.{dist.get_rank()}", "wb") as file:
    pickle.dump(found, file)
"""


@pytest.mark.slow
def test_zeropp_on_two_hosts_of_two_ranks_equals_its_simulation_in_one_process(tmp_path: Path) -> None:
    loco = {"zeropp_loco_param": {"err_beta": 0.3, "reset_T": 2}}
    zero = all_of("weights", "nontrainable_weights", "gradients", **loco)
    cases = [
        Case({**zero, **hpz}, model="frozen", node=2, accumulation=1, steps=4)
        for hpz in ({"zero_hpz_partition_size": 2}, {})  # without it, a node is a host
    ]
    folder = tmp_path / "four"
    folder.mkdir()
    (folder / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=wl0\n")
    (folder / "cases").write_bytes(pickle.dumps(cases))
    machines = Machines(tmp_path / "machines", 2, slots=2)
    try:
        four = Launched(machines, folder, ZEROPP)
        assert four.wait(240) == 0, four.err.read_text()
    finally:
        machines.close()
    by_rank = [pickle.loads((folder / f"found.{rank}").read_bytes()) for rank in range(4)]
    for number, case in enumerate(cases):
        of_case = [one[number] for one in by_rank]
        assert_equals_simulation(case, of_case)
        assert all(0 < one["across"]["gather"] < one["moved"]["gather"] for one in of_case)


AGAIN = """
import os, time
from pathlib import Path
name = "{WINDLASS_RESTARTS}.{RANK}of{WORLD_SIZE}".format(**os.environ)
Path(name).write_text(str(os.getppid()))
if os.environ["WINDLASS_RESTARTS"] == "0":
    time.sleep(600)
"""


@pytest.mark.slow
def test_lost_host_is_excluded_from_the_restart(machines: Machines, tmp_path: Path) -> None:
    options = ("--include", "node-0@node-1", "--max-restarts", "1")
    run = Launched(machines, tmp_path / "again", AGAIN, options=options)
    agent = run.folder / "0.1of2"
    until(lambda: agent.exists() and agent.read_text() != "" and (run.folder / "0.0of2").exists(), "ranks start")
    os.kill(int(agent.read_text()), signal.SIGKILL)
    assert run.wait() == 0, run.err.read_text()
    assert (run.folder / "1.0of1").exists()
    assert "restarting on 1 rank (restart 1 of 1)" in run.err.read_text()


@pytest.mark.slow
def test_suspended_launcher_ends_no_rank(machines: Machines, tmp_path: Path) -> None:
    run = Launched(machines, tmp_path / "suspended", SLEEPS, options=("--include", "node-0@node-1"))
    until(lambda: len(run.pids("rank")) == 2, "ranks start")
    run.process.send_signal(signal.SIGTSTP)
    time.sleep(KEEPALIVE_TIMEOUT_S + 5)
    assert all(map(is_alive, run.everything())), "it was announced"
    run.process.send_signal(signal.SIGCONT)
    time.sleep(2)
    assert all(map(is_alive, run.everything()))
    run.process.terminate()
    assert run.wait() == 143
    until(lambda: not any(map(is_alive, run.everything())), "all end")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdsh") is None, reason="pdsh is not installed")
def test_launch_over_pdsh(machines: Machines, tmp_path: Path) -> None:
    """pdsh passes arguments, a failed rank ends the other host's rank, Ctrl-C or a killed launcher ends all."""
    options = ("--launcher", "pdsh", "--include", "node-0@node-1")
    tells = Launched(machines, tmp_path / "tells", TELLS, *HOSTILE, options=options)
    assert tells.wait() == 0, tells.err.read_text()
    for rank in (0, 1):
        assert json.loads((tells.folder / f"tells.{rank}").read_text())["arguments"] == HOSTILE
    runs = {
        name: Launched(machines, tmp_path / name, SLEEPS, name, options=(*options, "--master_port", str(29501 + index)))
        for index, name in enumerate(("fails", "asked", "killed"))
    }
    until(lambda: all(len(run.pids("rank")) == 2 for run in runs.values()), "ranks start")
    (runs["fails"].folder / "go").touch()
    runs["asked"].process.send_signal(signal.SIGINT)
    runs["killed"].process.kill()
    for run in runs.values():
        until(lambda run=run: run.process.poll() is not None, "the launcher ends")
        until(lambda run=run: not any(map(is_alive, run.everything())), "all end")
    assert [run.process.returncode for run in runs.values()] == [1, 130, -9]
    assert "ValueError: one rank is unwell" in runs["fails"].err.read_text()
