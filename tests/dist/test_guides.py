"""The programs of the guides, as they are printed: FSDP2's and windlass' have the same losses on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.dist.harness import run_ranks

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


class Model(nn.Module):
    """Blocks between an embedding and a head, as the guide's programs take for granted."""

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
    """The Python of a guide, by the comment in its first line."""
    blocks = re.findall(r"```python\n# ([^\n]+)\n(.*?)```", (GUIDES / guide).read_text(), re.DOTALL)
    return dict(blocks)


def batches(first: int, last: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of this rank, by number."""
    found = []
    for number in range(first, last):
        draw = torch.Generator().manual_seed(100 * dist.get_rank() + number % 2)
        found.append((torch.randn(4, 6, generator=draw), torch.randint(0, 5, (4,), generator=draw)))
    return found


def setting(first: int, last: int) -> dict[str, Any]:
    """The names that a program finds."""
    device = torch.device("cpu")
    return {"model": Model(), "device": device, "batches": batches(first, last), "losses": [], "dist": dist} | {
        "loss_of": functional.cross_entropy
    }


def both(replace: tuple[str, str] = ("", "")) -> tuple[list[float], list[float]]:
    code, found = programs("from-fsdp2.md"), []
    for name in ("FSDP2", "windlass"):
        names = setting(0, 6)
        exec(code[name].replace(*replace) if name == "windlass" and replace[0] else code[name], names)
        found.append(names["losses"])
        if name == "windlass":
            names["engine"].destroy()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_program_of_fsdp2_and_its_translation_have_the_same_losses(stage: int) -> None:
    for theirs, ours in run_ranks(both, 2, ('"stage": 3', f'"stage": {stage}'), transport="gloo"):
        assert len(theirs) == 6 and theirs[4] < theirs[2] < theirs[0]
        assert ours == pytest.approx(theirs, abs=1e-6)


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
            parameter.zero_()  # so that what follows can only come from the file
    exec(opening, names)
    exec(code["go on in windlass"], names)
    exec(training, names)
    names["engine"].destroy()
    return names["losses"]


def test_a_run_of_fsdp2_goes_on_in_windlass(tmp_path: Path) -> None:
    for theirs, ours in run_ranks(taken_along, 2, str(tmp_path / "whole.pt"), transport="gloo"):
        assert len(theirs) == 4 and ours == pytest.approx(theirs, abs=1e-6)
