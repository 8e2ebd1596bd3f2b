"""Tests of `windlass run --servers`: equality with DDP, a worker and a server that a signal ends, and refused flags."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parameter_server.jobs import Job
from tests.parameter_server.test_parameter_server import loss_of, sgd
from tests.process.wait_until import until
from windlass.parameter_server.settings import ParameterServerSettings

ROOT = Path(__file__).parents[2]

JOB = """
import os, signal, sys
import torch
from windlass import parameter_server as ps
kills = sys.argv[1:] == ["kill"]
settings = ps.ParameterServerSettings(
    mode="asynchronous", snapshot="snapshots", snapshot_every=1, connect_seconds=60
)
model = torch.nn.Linear(3, 2)
last = str(int(os.environ["WINDLASS_SERVERS"]) - 1)
if kills and os.environ["RANK"] == last and not os.path.exists("killed"):  # a server, after the first push
    from windlass.parameter_server import server_shard
    update = server_shard.ServerShard.update
    def once(self, gradients):
        update(self, gradients)
        open("killed", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    server_shard.ServerShard.update = once
worker = ps.start(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), settings)
if worker is None:
    sys.exit()
with worker:
    for step in range(3):
        worker.pull()
        model(torch.ones(1, 3)).sum().backward()
        worker.push()
        if kills and worker.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    print("worker", worker.index, "of", os.environ["WINDLASS_SERVERS"], "servers at", worker.pull() > 2)
"""


def run(folder: Path, *words: str, script: str = JOB) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(script)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))}
    command = [sys.executable, "-m", "windlass", "run", *words]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**env, "PYTHONPATH": str(ROOT)}, timeout=240
    )


TRAINS = """
import os, sys
import torch, torch.distributed as dist
import windlass
from windlass import parameter_server as ps
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
index = int(os.environ["RANK"]) - int(os.environ.get("WINDLASS_SERVERS", 0))

def backward(model, step):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + index))
    model(x).square().mean().backward()

def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)

if sys.argv[1] == "ddp":
    windlass.init_distributed("gloo")
    parallel, optimizer = torch.nn.parallel.DistributedDataParallel(model), adamw(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        backward(parallel, step)
        optimizer.step()
    dist.destroy_process_group()
else:
    worker = ps.start(model, adamw, ps.ParameterServerSettings(mode="synchronous", connect_seconds=60))
    if worker is None:
        sys.exit()
    with worker:
        for step in range(4):
            worker.pull()
            backward(model, step)
            worker.push()
        worker.pull()
torch.save(model.state_dict(), f"{sys.argv[1]}.{index}")
"""


@pytest.mark.slow
def test_two_servers_and_four_workers_train_as_four_ranks_of_torch(tmp_path: Path) -> None:
    for words in (("--servers", "2", "--workers", "4", "job.py", "servers"), ("--nproc", "4", "job.py", "ddp")):
        done = run(tmp_path, *words, script=TRAINS)
        assert done.returncode == 0, done.stderr
    wanted = torch.load(tmp_path / "ddp.0")
    for index in range(4):
        found = torch.load(tmp_path / f"servers.{index}")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_the_example_runs_in_both_modes(tmp_path: Path) -> None:
    """The script of the documented measurement runs the example, and draws its curves."""
    command = [sys.executable, str(ROOT / "bench" / "parameter_server.py"), "--seconds", "4", "--workers", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--results", str(tmp_path)], env=env, check=True, timeout=240)
    found = json.loads((tmp_path / "parameter_server.json").read_text())
    assert set(found["curves"]) == {"synchronous", "asynchronous"}
    for curve in found["curves"].values():
        assert curve[-1][1] > 0 and curve[-1][2] < curve[0][2]  # updates lower the loss
    assert (tmp_path / "parameter_server.png").stat().st_size > 10_000


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_worker_leaves_and_a_killed_server_continues(servers: int, tmp_path: Path) -> None:
    done = run(tmp_path, "--servers", str(servers), "--workers", "2", "job.py", "kill")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[rank {servers}] worker 0 of {servers} servers at True"]
    assert f"rank {servers - 1}, a parameter server, was ended by SIGKILL: it is started again" in done.stderr
    assert f"rank {servers + 1}, a worker, was ended by SIGKILL: the run continues without it" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--servers", "1"), "--servers 1 --workers 0: a parameter server job needs both"),
        (("--replicas", "1"), "--replicas 1 without --servers and --workers: there is nothing to copy"),
        (("--servers", "1", "--workers", "2", "--nproc", "3"), "--nproc or --num_gpus with --servers and --workers"),
        (("--servers", "1", "--workers", "2", "--max-restarts", "1"), "--max-restarts with --servers"),
    ],
)
def test_flags_that_contradict_are_refused(words: tuple[str, ...], message: str) -> None:
    from windlass.launch.launch_errors import LaunchError
    from windlass.launch.launch_flags import build_run_parser, parse_flags
    from windlass.launch.plan_from_flags import plan_from_args

    with pytest.raises(LaunchError) as caught:
        plan_from_args(parse_flags(build_run_parser(), [*words, "job.py"]), {})
    assert message in str(caught.value)


def test_replicas_are_ranks_between_servers_and_workers() -> None:
    from windlass.launch.launch_flags import build_run_parser, parse_flags
    from windlass.launch.plan_from_flags import plan_from_args

    words = ["--servers", "2", "--replicas", "1", "--workers", "3", "job.py"]
    plan = plan_from_args(parse_flags(build_run_parser(), words), {})
    assert len(plan.hosts[0].slots) == 7 and plan.servers == 4  # the first four ranks (servers, replicas) are restarted
    assert plan.env["WINDLASS_SERVERS"] == "2" and plan.env["WINDLASS_REPLICAS"] == "1"


SERVER = """
import sys
from datetime import timedelta
from torch import nn
from torch.optim import SGD
from windlass.comm.loopback import bind_gloo_to_loopback
from windlass.parameter_server.job_rendezvous import JobRendezvous
from windlass.parameter_server.model_layout import layout_of
from windlass.parameter_server.settings import ParameterServerSettings
from windlass.parameter_server.shard_process import ShardProcess
bind_gloo_to_loopback()
rendezvous = JobRendezvous("127.0.0.1", int(sys.argv[1]), serve=False, connect=timedelta(seconds=60))
settings = ParameterServerSettings(mode="asynchronous", heartbeat_seconds=2.0)
ShardProcess(layout_of(nn.Linear(5, 2), 1), 0, 0, 1, 1, settings, lambda own: SGD(own, lr=0.1), rendezvous).run()
"""


@pytest.mark.parametrize("is_pushing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stopped_server_is_replaced_and_may_continue(is_pushing: bool) -> None:
    """The server's connections stay open: the replica and the worker detect its loss by missing heartbeats."""
    settings = ParameterServerSettings(mode="asynchronous", heartbeat_seconds=2.0)
    job = Job(lambda: nn.Linear(5, 2), sgd, settings, servers=1, workers=1)
    command = [sys.executable, "-c", SERVER, str(job.port)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        job.start_process(0, 1, replicas=1)
        model, worker = job.worker(0)
        for step in range(3):
            worker.pull()
            loss_of(model, step, 0).backward()
            if step == 1 and is_pushing:
                process.send_signal(signal.SIGSTOP)
            worker.push()
            if step == 1 and not is_pushing:
                process.send_signal(signal.SIGSTOP)
        assert worker.pull() == 3
        process.send_signal(signal.SIGCONT)
        until(lambda: job.rendezvous().record(0).replicas == {0}, "the server that was stopped becomes the replica")
        worker.close()
        job.finish()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
