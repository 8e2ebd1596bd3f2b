"""`windlass bench transport`: the same training over each way between ranks, one run of fresh ranks a setting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from windlass.base.errors import WindlassError
from windlass.cli.benches.facts import write_result
from windlass.cli.benches.picture import Panel, draw
from windlass.cli.benches.ranks import measure
from windlass.cli.benches.screen import screen
from windlass.cli.benches.training import EQUAL_LOSS, Sizes, plain_config

NCCL_SWITCHES = ("NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_DISABLE")
_SHORT = {"NCCL_IB_DISABLE": "IB", "NCCL_SHM_DISABLE": "SHM", "NCCL_P2P_DISABLE": "P2P"}
CPU_TO_GPU_LOSS = 1e-3
"""How far losses on the CPU may be from those on GPUs: products are summed in another order."""


@dataclass(frozen=True)
class Setting:
    """One way between ranks.

    Attributes:
        device: what the ranks train on, `cpu` or `cuda`.
        env: more of the ranks' environment, which is read when they start.
    """

    label: str
    device: str
    env: dict[str, str]


@dataclass
class Found:
    """What the runs of one setting came to.

    Attributes:
        seconds: of each timed step, on its slowest rank.
        losses: of each step, over all ranks; empty until a run succeeded.
        run_seconds: of each run, from the start of its ranks to the end of the last.
    """

    setting: Setting
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    run_seconds: list[float] = field(default_factory=list)
    transport: str = ""
    parameters: int = 0
    failed: str = ""


def settings_here(gpus: int, *, cpu: bool = True) -> list[Setting]:
    """Shared memory and gloo for ranks on the CPU; with GPUs, nccl under each of the eight settings first.

    Args:
        gpus: how many this machine has.
        cpu: the CPU's ways too, where there are GPUs.
    """
    found = []
    if gpus:
        for disabled in product("01", repeat=len(NCCL_SWITCHES)):
            env = dict(zip(NCCL_SWITCHES, disabled, strict=True))
            off = [_SHORT[name] for name, value in env.items() if value == "1"]
            label = f"nccl without {', '.join(off)}" if off else "nccl"
            found.append(Setting(label, "cuda", {"WINDLASS_TRANSPORT": "nccl", **env}))
    if cpu or not gpus:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if gpus else {}
        found += [Setting(name, "cpu", {"WINDLASS_TRANSPORT": name, **hidden}) for name in ("shm", "gloo")]
    return found


def transport(settings: Sequence[Setting], nproc: int, sizes: Sizes, stage: int, out: Path) -> bool:
    """Train under each setting in turns, `sizes.rounds` times; print the table, write JSON and picture.

    Args:
        settings: the first is what the others are compared with.
        stage: of ZeRO.

    Returns:
        Whether the losses of all that ran are equal, and at least one ran.
    """
    console = screen()
    everything = [Found(setting) for setting in settings]
    alone = Sizes(**{**vars(sizes), "rounds": 1})
    for turn in range(sizes.rounds):
        for found in everything if turn % 2 == 0 else reversed(everything):  # drift of the machine hits all alike
            if not found.failed:
                console.print(f"{turn + 1} of {sizes.rounds}: {found.setting.label}, {nproc} fresh ranks", style="dim")
                _run_once(found, nproc, alone, stage)
    ran = [found for found in everything if not found.failed]
    verdicts, equal = _verdicts(ran, nproc)
    verdicts += [f"{one.setting.label}: absent, {one.failed}" for one in everything if one.failed]
    _tell(ran, verdicts, nproc, sizes, stage, out)
    return equal


def _run_once(found: Found, nproc: int, sizes: Sizes, stage: int) -> None:
    label, start = found.setting.label, time.perf_counter()
    try:
        ranks = measure(sizes.work({label: plain_config(sizes, stage=stage)}), nproc, found.setting.env)
    except WindlassError as error:  # some settings leave no way at all; that is a result
        found.failed = str(error)
        return
    found.run_seconds.append(time.perf_counter() - start)
    found.seconds += [max(step) for step in zip(*(rank["seconds"][label] for rank in ranks), strict=True)]
    losses = [statistics.mean(step) for step in zip(*(rank["losses"][label] for rank in ranks), strict=True)]
    found.losses += losses
    found.transport, found.parameters = ranks[0]["transport"][label], ranks[0]["parameters"]


def _verdicts(ran: Sequence[Found], nproc: int) -> tuple[list[str], bool]:
    if not ran:
        return ["no setting ran"], False
    reference = ran[0]
    far, furthest = [], 0.0
    for found in ran:
        apart = max(abs(a - b) for a, b in zip(found.losses, reference.losses, strict=True))
        bound = EQUAL_LOSS if found.setting.device == reference.setting.device else CPU_TO_GPU_LOSS
        furthest = max(furthest, apart)
        if not apart <= bound:  # NaN is far too
            far.append(f"{found.setting.label} is {apart:.1e} apart (bound {bound:.0e})")
    said = "NOT equal: " + "; ".join(far) if far else f"equal; the furthest is {furthest:.1e} apart"
    verdicts = [f"losses: {said}"]
    for found in ran[1:]:
        ratio = statistics.median(found.seconds) / statistics.median(reference.seconds)
        verdicts.append(f"{found.setting.label}: {ratio:.2f} x the time of {reference.setting.label}")
    if nproc == 1:
        verdicts.append("one rank has nobody to talk to: these settings differ in nothing; use -n 2 or more")
    return verdicts, not far


def _tell(ran: Sequence[Found], verdicts: list[str], nproc: int, sizes: Sizes, stage: int, out: Path) -> None:
    rows = {found.setting.label: _row(found, nproc, sizes) for found in ran}
    console = screen()
    console.print(_table(rows, nproc, sizes, stage))
    for line in verdicts:
        console.print(line, soft_wrap=True)
    result = {
        "bench": "transport",
        "ranks": nproc,
        "stage": stage,
        "sizes": vars(sizes),
        "rows": rows,
        "verdicts": verdicts,
    }
    written = write_result(out / "transport.json", result)
    panels = [
        Panel("speed", "samples / s", {label: row["samples_per_second"] for label, row in rows.items()}),
        Panel("run time", "s, from start to end", {label: row["run_seconds"] for label, row in rows.items()}),
    ]
    drawn = bool(rows) and draw(panels, out / "transport.png", f"windlass bench transport, {nproc} ranks")
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)


def _row(found: Found, nproc: int, sizes: Sizes) -> dict[str, Any]:
    return {
        "device": found.setting.device,
        "transport": found.transport,
        "env": found.setting.env,
        "samples_per_second": nproc * sizes.batch / statistics.median(found.seconds),
        "run_seconds": statistics.median(found.run_seconds),
        "seconds": found.seconds,
        "run_seconds_of_each": found.run_seconds,
        "losses": found.losses,
        "parameters": found.parameters,
    }


def _table(rows: dict[str, dict[str, Any]], nproc: int, sizes: Sizes, stage: int) -> Table:
    parameters = next((row["parameters"] for row in rows.values()), 0)
    title = (
        f"{parameters / 1e6:.1f}M parameters, stage {stage}, {nproc} ranks x {sizes.batch} x {sizes.length} tokens; "
        "run time: of the whole run, the start of its ranks included"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "device", "samples/s", "ms/step", "spread", "run time s", "last loss"):
        table.add_column(column, justify="left" if column in ("", "device") else "right")
    for label, row in rows.items():
        seconds = row["seconds"]
        table.add_row(
            label,
            row["device"],
            f"{row['samples_per_second']:.2f}",
            f"{statistics.median(seconds) * 1e3:.1f}",
            f"{min(seconds) * 1e3:.0f}-{max(seconds) * 1e3:.0f}",
            f"{row['run_seconds']:.1f}",
            f"{row['losses'][-1]:.4f}",
        )
    return table
