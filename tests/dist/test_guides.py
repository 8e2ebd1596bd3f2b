"""Tests of the programs printed in the guides: windlass gives the losses of FSDP2 and of Accelerate on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.dist.harness import run_ranks

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


class Model(nn.Module):
    """Blocks between an embedding and a head, as the guide's programs assume."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def programs(guide: str) -> dict[str, str]:
    """Return the Python blocks of a guide, by the comment in their first line."""
    blocks = re.findall(r"```python\n# ([^\n]+)\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL)
    return dict(blocks)


def batches(first: int, last: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's batches with the numbers `first` to `last - 1`."""
    results = []
    for number in range(first, last):
        draw = torch.Generator().manual_seed(100 * int(os.environ["RANK"]) + number % 2)
        results.append((torch.randn(4, 6, generator=draw), torch.randint(0, 5, (4,), generator=draw)))
    return results


def setting(first: int, last: int) -> dict[str, Any]:
    """Return the names that a program of the guide expects."""
    device = torch.device("cpu")
    return {"model": Model(), "device": device, "batches": batches(first, last), "losses": [], "dist": dist} | {
        "loss_of": functional.cross_entropy
    }


def losses_of(code: str, **more: Any) -> list[float]:
    names = setting(0, 6) | more
    exec(code, names)
    assert "deepspeed_plugin" not in code or type(names["model"]).__name__ == "DeepSpeedEngine"
    if "engine" in names:
        names["engine"].destroy()
    return names["losses"]


def fsdp2(changes: dict[str, tuple[tuple[str, str], ...]]) -> list[list[float]]:
    """Return the losses of both programs after `changes` to their texts."""
    results = []
    for name, code in programs("from-fsdp2.md").items():
        if name in changes:
            for before, after in changes[name]:
                assert before in code
                code = code.replace(before, after)
            results.append(losses_of(code))
    return results


_KEPT = {
    "FSDP2": (("mesh=mesh", "mesh=mesh, reshard_after_forward=False"),),
    "windlass": (('"stage": 3', '"stage": 2'),),
}
_BF16 = {
    "FSDP2": (
        ("mesh=mesh", "mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)"),
        ("import fully_shard", "import MixedPrecisionPolicy, fully_shard"),
    ),
    "windlass": (
        ('"zero_optimization"', '"bf16": {"enabled": True}, "zero_optimization"'),
        ("(inputs)", "(inputs.bfloat16())"),
    ),
}


@pytest.mark.parametrize(
    ("changes", "bound"), [({"FSDP2": (), "windlass": ()}, 1e-6), (_KEPT, 1e-6), (_BF16, 1e-2)], ids=["3", "2", "bf16"]
)
def test_fsdp2_program_and_its_translation_have_equal_losses(changes: Any, bound: float) -> None:
    for theirs, ours in run_ranks(fsdp2, 2, changes, transport="gloo"):
        assert len(theirs) == 6 and theirs[4] < theirs[2] < theirs[0]
        assert ours == pytest.approx(theirs, abs=bound)


def taken_along(file: str) -> tuple[list[float], list[float]]:
    code = programs("from-fsdp2.md")
    loop = code["FSDP2"].split("\n\n")[-1]
    before = setting(0, 4)
    exec(code["FSDP2"] + code["leave FSDP2"].replace("file)", repr(file) + ")"), before)
    dist.barrier()
    before |= {"batches": batches(4, 8), "losses": []}
    exec(loop, before)
    return before["losses"], _go_on(code, file)


def _go_on(code: dict[str, str], file: str) -> list[float]:
    opening, training = code["windlass"].rsplit("\n\n", 1)
    names = setting(4, 8) | {"file": file}
    with torch.no_grad():
        for parameter in names["model"].parameters():
            parameter.zero_()  # so that later values can only come from the file
    exec(opening, names)
    exec(code["go on in windlass"], names)
    exec(training, names)
    names["engine"].destroy()
    return names["losses"]


def test_fsdp2_run_resumes_in_windlass(tmp_path: Path) -> None:
    for theirs, ours in run_ranks(taken_along, 2, str(tmp_path / "whole.pt"), transport="gloo"):
        assert len(theirs) == 4 and ours == pytest.approx(theirs, abs=1e-6)


def accelerates(name: str) -> list[float]:
    """Return the losses of a program of the guide. All programs train on the same data in the same order."""
    draw = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(
        torch.randn(48, 6, generator=draw), torch.randint(0, 5, (48,), generator=draw)
    )
    names: dict[str, Any] = {"dataset": data, "loader": torch.utils.data.DataLoader(data, batch_size=4)}
    if name != "windlass":
        from accelerate.utils import InitProcessGroupKwargs

        handlers = {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]} if name == "kept" else {}
        names["more"] = handlers or {"cpu": True}
    return losses_of(programs("from-accelerate.md")[name], **names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kept", "windlass"])
def test_accelerate_plain_with_stand_in_and_translated_have_equal_losses(name: str) -> None:
    pytest.importorskip("accelerate")
    from windlass.compat.stand_in_path import STAND_IN_FOLDER

    plain = [sum(step) for step in zip(*_fresh("Accelerate", {}), strict=True)]
    ours = [
        sum(step)
        for step in zip(*_fresh(name, {"PYTHONPATH": str(STAND_IN_FOLDER)} if name == "kept" else {}), strict=True)
    ]
    assert len(plain) == 6 and ours == pytest.approx(plain, abs=1e-5)


def _fresh(name: str, env: dict[str, str]) -> list[list[float]]:
    """Run a program on two fresh ranks, since Accelerate keeps its state for the life of a process."""
    code = (
        "import json, os, sys, torch.distributed as dist\n"
        "from tests.dist.test_guides import accelerates\n"
        f"losses = accelerates({name!r})\n"
        "json.dump(losses, open(sys.argv[1] + os.environ['RANK'], 'w'))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(code)
        path = os.pathsep.join([*env.values(), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-m", "windlass", "run", "--nproc", "2", str(script), folder + "/losses"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(Path(folder, f"losses{rank}").read_text()) for rank in range(2)]
