"""Test that kills ranks and launchers with SIGKILL while they train and save, and checks the remaining checkpoints each
time.

python bench/kill_and_resume.py --path /mnt/nvme
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rig.chaos_world import RANKS, Fate, World, read_marks

from windlass.checkpoint import read_full, read_latest, read_plain
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result

_RESULTS = Path(__file__).parent / "results"
_WORLD_SCRIPT = Path(__file__).parent / "rig" / "chaos_world.py"
_UNBOUNDED_STEPS = 1 << 30
_MAX_FILE_CALLS = 45  # approximate file-system calls of rank 0 in three saves
_VICTIMS = ("one rank", "all ranks", "launcher")


@dataclass(frozen=True)
class KillPlan:
    """Victim of a round, and the moment of the kill.

    Attributes:
        file_calls: number of file-system calls of `rank` after which that rank kills itself, or all ranks if they are
            the victim;
        None: the victim is killed after `seconds`.
        seconds: time from the first steps to the kill.
    """

    victim: str
    rank: int
    file_calls: int | None
    seconds: float

    @property
    def description(self) -> str:
        who = f"rank {self.rank}" if self.victim == "one rank" else self.victim
        when = (
            f"at call {self.file_calls} of the file system"
            if self.file_calls is not None
            else f"after {self.seconds:.2f} s"
        )
        return f"{who}, {when}"


def make_kill_plans(rounds: int, seed: int, launchers: int, at_calls_only: bool) -> list[KillPlan]:
    """Return the plan of each round. About `launchers` rounds kill a launcher after some seconds. Of the others, those
    with odd numbers (all, if `at_calls_only`) kill ranks at a file-system call, the rest after some seconds."""
    chance, made = random.Random(seed), list[KillPlan]()
    for number in range(rounds):
        victim = "launcher" if number % max(rounds // max(launchers, 1), 1) == 0 and launchers else "one rank"
        if victim != "launcher" and chance.random() < 0.5:
            victim = "all ranks"
        aimed = victim != "launcher" and (number % 2 == 1 or at_calls_only)
        rank, calls, seconds = chance.randrange(RANKS), chance.randrange(_MAX_FILE_CALLS), chance.uniform(0.0, 1.0)
        calls = calls if rank == 0 else calls // 6  # ranks other than 0 only write their files
        made.append(KillPlan(victim, rank, calls if aimed else None, seconds))
    return made


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Number of kills.")] = 50,
    launchers: Annotated[int, typer.Option(min=0, help="Number of kills of launchers (`windlass run`).")] = 8,
    aimed: Annotated[
        bool, typer.Option("--aimed", help="Kill only at file-system calls, so that runs are reproducible.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of victims and moments.")] = 0,
    path: Annotated[Path, typer.Option(help="A folder on the disk to use.")] = Path("."),
    name: Annotated[str, typer.Option(help="Name of the file in --results.")] = "chaos",
    results: Annotated[Path, typer.Option(help="Folder of the JSON.")] = _RESULTS,
) -> None:
    """Kill, check, print the table, write the JSON. Exit code 1: a checkpoint does not load, a finished save is
    missing, old staging directories remain, or a loss differs from that of an undisturbed run."""
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", WINDLASS_LOG_LEVEL="WARNING")
    console, result = bench_console(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="windlass-chaos-", dir=path) as name_of_folder:
        folder = Path(name_of_folder)
        for number, plan in enumerate(make_kill_plans(rounds, seed, launchers, aimed)):
            result.append(
                {"round": number, "killed": plan.description, "victim": plan.victim, **_run_round(folder, plan)}
            )
            console.print(f"{number + 1}/{rounds} {_round_summary(result[-1])}", soft_wrap=True)
        disturbed = _read_losses(folder)
        problems = [f"round {item['round']}: {text}" for item in result for text in item["problems"]]
        problems += disturbed.problems
        last = max(step for step, _ in disturbed.losses) + 1
        quiet = folder / "quiet"
        quiet.mkdir()
        left = World(quiet, last, saves=False).wait(600)
        if left:
            problems.append("the undisturbed run did not end")
        calm = _read_losses(quiet).losses
        wrong = [key for key, loss in disturbed.losses.items() if calm.get(key) != loss]
        problems += [
            f"step {step}, rank {rank}: the loss differs from that of an undisturbed run" for step, rank in wrong[:5]
        ]
    verdict = {
        "rounds": rounds,
        "in_a_save": sum(item["in_save"] != "" for item in result),
        "steps": last,
        "steps_made_again": sum(item["lost_steps"] for item in result),
        "losses_compared": len(disturbed.losses),
        "problems": problems,
    }
    console.print(_result_table(result, verdict))
    written = write_result(
        results / f"{name}.json", {"bench": "chaos", "seed": seed, "verdict": verdict, "rounds": result}
    )
    console.print(f"written: {written}", soft_wrap=True)
    for text in problems:
        console.print(f"LOST: {text}", soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def _run_round(folder: Path, plan: KillPlan) -> dict[str, Any]:
    before = [len(read_marks(folder, rank)) for rank in range(RANKS)]
    drafts = _staging_checkpoints(folder)
    if plan.victim == "launcher":
        _kill_launcher(folder, plan, before)
    else:
        fate = Fate(plan.rank, plan.file_calls, plan.victim == "all ranks") if plan.file_calls is not None else None
        world = World(folder, _UNBOUNDED_STEPS, fate=fate)
        if fate is None:
            _wait_for_steps(folder, before)
            time.sleep(plan.seconds)
            world.kill(set(world.pids) if plan.victim == "all ranks" else {world.pids[plan.rank]})
        else:
            while len(world.running()) == RANKS:
                time.sleep(0.002)
        world.kill(world.wait(1.0))  # as a launcher does with the remaining ranks
        world.wait(60)
    return _inspect_folder(folder, before, drafts)


def _kill_launcher(folder: Path, plan: KillPlan, before: list[int]) -> None:
    command = [
        sys.executable,
        "-m",
        "windlass",
        "run",
        "--nproc",
        str(RANKS),
        str(_WORLD_SCRIPT),
        str(folder),
        str(_UNBOUNDED_STEPS),
    ]
    with open(folder / "launcher", "a") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=output)
        _wait_for_steps(folder, before)
        time.sleep(plan.seconds)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    pids = [
        int(line[2]) for rank in range(RANKS) for line in read_marks(folder, rank)[before[rank] :] if line[1] == "pid"
    ]
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > until:
            raise RuntimeError(f"ranks {pids} still run after their launcher ended")
        time.sleep(0.01)


def _wait_for_steps(folder: Path, before: list[int]) -> None:
    until = time.monotonic() + 300
    while not all(any(line[1] == "step" for line in read_marks(folder, rank)[before[rank] :]) for rank in range(RANKS)):
        if time.monotonic() > until:
            logs = [
                (folder / f"log{rank}").read_text()[-2000:] for rank in range(RANKS) if (folder / f"log{rank}").exists()
            ]
            raise RuntimeError(f"no rank trains: {logs}")
        time.sleep(0.005)


def _inspect_folder(folder: Path, before: list[int], drafts: set[str]) -> dict[str, Any]:
    """Return the steps and checkpoints that are left after a round, and the problems: a checkpoint that does not load,
    a finished save that is missing, staging directories of an earlier round."""
    saved, problems = folder / "saved", list[str]()
    marks = [read_marks(folder, rank)[before[rank] :] for rank in range(RANKS)]
    steps = [int(line[2]) + 1 for line in marks[0] if line[1] == "step"]
    saves = [line for line in marks[0] if line[1] in ("save", "goes", "done")]
    promised = max(
        [int(line[2]) for rank in range(RANKS) for line in read_marks(folder, rank) if line[1] == "done"] or [0]
    )
    kept, tag = 0, read_latest(saved) if saved.exists() else None
    try:
        if tag is not None:
            for _ in read_full(saved, tag):  # each chunk's crc32 is checked
                pass
            kept = int(read_plain(saved, tag)["engine"]["global_steps"])
    except Exception as error:
        problems.append(f"{tag} does not load: {type(error).__name__}: {error}")
    if kept < promised:
        problems.append(f"a save of step {promised} was reported as finished, but the latest checkpoint is {kept}")
    if any(line[1] == "done" for line in marks[0]) and (old := drafts & _staging_checkpoints(folder)):
        problems.append(f"staging directories of an earlier round still exist: {sorted(old)}")
    begun = int(next((line[2] for line in marks[0] if line[1] == "up"), kept))  # the kill may come before the line `up`
    return {
        "in_save": _save_in_progress(saves),
        "began_at": begun,
        "reached": max(steps, default=begun),
        "kept": kept,
        "lost_steps": max([*steps, begun]) - kept,
        "drafts": len(_staging_checkpoints(folder)),
        "problems": problems,
    }


def _save_in_progress(saves: list[list[str]]) -> str:
    """Find the save that was being written, by the last log line of rank 0 about saves."""
    if not saves or saves[-1][1] == "done":
        return ""
    last = next(line for line in reversed(saves) if line[1] == "save")
    return f"{last[3]}, of step {last[2]}"


def _staging_checkpoints(folder: Path) -> set[str]:
    saved = folder / "saved"
    return (
        {path.name for path in saved.iterdir() if path.name.endswith(".writing") and path.is_dir()}
        if saved.exists()
        else set()
    )


@dataclass
class _LossesOfSteps:
    losses: dict[tuple[int, int], str]
    problems: list[str]


def _read_losses(folder: Path) -> _LossesOfSteps:
    """Read the loss of each step and rank; repetitions of a step must have the same loss."""
    losses: dict[tuple[int, int], str] = {}
    problems = []
    for rank in range(RANKS):
        for line in read_marks(folder, rank):
            if line[1] == "step":
                key = int(line[2]), rank
                if losses.setdefault(key, line[3]) != line[3]:
                    problems.append(f"step {key[0]}, rank {rank}: the repeated step had another loss")
    return _LossesOfSteps(losses, problems)


def _round_summary(result: dict[str, Any]) -> str:
    save = f", in a save ({result['in_save']})" if result["in_save"] else ""
    problems = f" LOST: {result['problems']}" if result["problems"] else ""
    return f"killed {result['killed']}{save}: reached step {result['reached']}, kept {result['kept']}{problems}"


def _result_table(found: list[dict[str, Any]], verdict: dict[str, Any]) -> Table:
    table = Table(title=f"{verdict['rounds']} rounds, {verdict['steps']} steps", title_justify="left")
    for column in ("killed", "times", "in a save", "repeated steps", "problems"):
        table.add_column(column, justify="left" if column == "killed" else "right")
    for victim in _VICTIMS:
        ours = [item for item in found if item["victim"] == victim]
        counts = [sum(item["in_save"] != "" for item in ours), sum(item["lost_steps"] for item in ours)]
        table.add_row(victim, *map(str, [len(ours), *counts, sum(len(item["problems"]) for item in ours)]))
    return table


if __name__ == "__main__":
    typer.run(main)
