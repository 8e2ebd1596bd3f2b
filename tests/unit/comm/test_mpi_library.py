"""Tests of the refusals of the back end mpi that need no ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tools.generate_backend_table import markdown_table
from windlass.base.errors import CommunicationError
from windlass.cli.main import app
from windlass.comm.mpi_backend import _check_job
from windlass.comm.mpi_library import load_mpi
from windlass.observe.environment.backend_support import support_by_device


def library(level: int, finalized: bool = False) -> ModuleType:
    """Return a module `mpi4py` of an MPI with this thread level."""
    module = ModuleType("mpi4py")
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    levels = {f"THREAD_{name}": number for number, name in enumerate(names)}
    module.MPI = SimpleNamespace(  # type: ignore[attr-defined]
        Is_finalized=lambda: finalized, Is_initialized=lambda: True, Query_thread=lambda: level, **levels
    )
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, "the back end mpi needs mpi4py and an MPI library, and their import failed"),
        (library(0), "MPI was initialized with thread level MPI_THREAD_SINGLE"),
        (library(1), "MPI was initialized with thread level MPI_THREAD_FUNNELED"),
        (library(3, finalized=True), "MPI was finalized in this process"),
    ],
)
def test_an_unsuitable_mpi_is_refused(module: ModuleType | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    with pytest.raises(CommunicationError) as caught:
        load_mpi()
    assert message in str(caught.value)


@pytest.mark.parametrize("level", [2, 3])
def test_a_suitable_mpi_is_returned(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = library(level)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    assert load_mpi() is module.MPI


def test_ranks_of_two_jobs_at_one_rendezvous_are_refused() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    jobs = [
        SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_rank=lambda: 0, bcast=lambda value, root, job=job: job))
        for job in ("a", "b")
    ]
    _check_job(jobs[0], store, 0)
    _check_job(jobs[0], store, 1)
    with pytest.raises(CommunicationError, match="rank 2 .* belongs to another MPI job"):
        _check_job(jobs[1], store, 2)


def test_the_support_table_depends_on_the_machine() -> None:
    there = {"available": True, "version": None, "why": None, "cuda_aware": False}
    gone = {"available": False, "version": None, "why": "it is not installed"}
    table = support_by_device({"gloo": there, "nccl": gone, "mpi": gone, "shm": there}, gpu=True)
    assert table["all_reduce"]["gloo CPU"] == "native" and table["MINLOC"]["gloo CPU"] == "composed"
    assert {cells["mpi CPU"] for cells in table.values()} == {cells["nccl GPU"] for cells in table.values()} == {"-"}
    assert table["all_gather"]["shm CPU"] == "native" and table["gatherv"]["shm CPU"] == "-"


def test_the_table_of_this_machine_is_printed() -> None:
    result = CliRunner().invoke(app, ["env", "--backends"])
    assert result.exit_code == 0, result.output
    header, first, *_ = result.output.splitlines()
    assert header.split()[:2] == ["gloo", "CPU"] and first.split()[:2] == ["broadcast", "native"]
    assert ("nccl" in header) == torch.cuda.is_available()


def test_the_documented_table_is_true() -> None:
    """`tools/generate_backend_table.py` writes the table of docs/collectives.md."""
    page = (Path(__file__).parents[3] / "docs" / "collectives.md").read_text()
    assert "\n".join(markdown_table()) in page
