"""Tests of the back end mpi without an MPI job: refusals, coalesced operations, and the table of operations."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from typer.testing import CliRunner

from tools.generate_backend_table import markdown_table
from windlass.base.errors import CommunicationError
from windlass.cli.main import app
from windlass.comm.mpi_backend import _check_job
from windlass.comm.mpi_library import load_mpi
from windlass.comm.mpi_process_group import MpiProcessGroup
from windlass.comm.mpi_work import MpiWork
from windlass.observe.environment import backend_support
from windlass.observe.environment.backend_support import support_by_device


def library(level: int, finalized: bool = False) -> ModuleType:
    """Return a fake module `mpi4py` whose MPI has this thread level."""
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


def test_several_operations_at_once_are_polled_without_a_wait() -> None:
    """The work of a coalesced call completes with its last operation; a poll before that returns False."""
    requests: list[SimpleNamespace] = []

    def start(*_: object) -> SimpleNamespace:
        requests.append(SimpleNamespace(done=False))
        return requests[-1]

    def test_all(given: list[SimpleNamespace], _: object = None) -> bool:
        return all(request.done for request in given)

    mpi = MagicMock(Exception=OSError, Request=SimpleNamespace(Testall=test_all))
    communicator = SimpleNamespace(
        Get_rank=lambda: 0, Get_size=lambda: 2, Get_attr=lambda _: 100, Iallreduce=start, Iallgather=start
    )
    group = MpiProcessGroup(mpi, communicator, False, timedelta(seconds=0.2))
    works = [
        group.allreduce_coalesced([torch.ones(2), torch.ones(3)]),
        group.all_gather_single_coalesced([torch.zeros(2), torch.zeros(4)], [torch.ones(1), torch.ones(2)]),
    ]
    for number, work in enumerate(works):
        first, second = requests[2 * number : 2 * number + 2]
        first.done = True
        assert not work.is_completed() and not work.is_success()
        second.done = True
        assert work.is_completed() and work.is_success() and len(work.result()) == 2


def test_an_error_of_one_of_several_operations_is_that_of_their_work() -> None:
    class MpiError(Exception):
        def Get_error_code(self) -> int:
            return 1

    def fail(*_: object) -> bool:
        raise MpiError

    mpi = MagicMock(Exception=MpiError, SUCCESS=0, Request=SimpleNamespace(Testall=fail))
    mpi.Get_error_string = lambda code: "a rank is gone"
    part = MpiWork(mpi, "all_reduce", [MagicMock()], [], None, (), timedelta(seconds=1))
    work = MpiWork(mpi, "all_reduce_coalesced", [], [], None, (), timedelta(seconds=1), [part])
    for _ in range(2):
        with pytest.raises(CommunicationError, match="a rank is gone"):
            work.is_completed()
    assert not work.is_success() and work.exception() is part.exception() is not None


def test_a_result_that_cannot_be_copied_is_never_complete() -> None:
    def copy() -> None:
        raise ValueError("the output was resized")

    mpi = MagicMock(Exception=OSError, Request=SimpleNamespace(Testall=lambda *_: True))
    work = MpiWork(mpi, "all_gather", [MagicMock()], [], copy, (), timedelta(seconds=1))
    for _ in range(2):
        with pytest.raises(ValueError, match="the output was resized"):
            work.is_completed()
    assert not work.is_success()


def test_the_support_table_depends_on_the_machine() -> None:
    there = {"available": True, "version": None, "why": None, "cuda_aware": False}
    gone = {"available": False, "version": None, "why": "it is not installed"}
    table = support_by_device({"gloo": there, "nccl": gone, "mpi": gone, "shm": there}, gpu=True)
    assert table["all_reduce"]["gloo CPU"] == "native" and table["MINLOC"]["gloo CPU"] == "composed"
    assert {cells["mpi CPU"] for cells in table.values()} == {cells["nccl GPU"] for cells in table.values()} == {"-"}
    assert table["all_gather"]["shm CPU"] == "native" and table["gatherv"]["shm CPU"] == "-"


@pytest.mark.parametrize(
    ("answer", "variables", "aware"),
    [
        (1, {}, True),
        (0, {}, False),
        (None, {}, False),  # an MPI without the function
        (None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        (None, {"I_MPI_OFFLOAD": "0"}, False),
        (0, {"MV2_USE_CUDA": " 1 "}, True),
    ],
)
def test_cuda_awareness_is_reported_by_mpi_or_enabled_by_a_variable(
    answer: int | None, variables: dict[str, str], aware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in backend_support._CUDA_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    functions = {} if answer is None else {"MPIX_Query_cuda_support": lambda: answer}
    libraries = {"MPI.so": SimpleNamespace(**functions)}
    monkeypatch.setattr("ctypes.CDLL", libraries.__getitem__)
    assert backend_support.is_cuda_aware(SimpleNamespace(__file__="MPI.so")) is aware
    there = {"available": True, "version": None, "why": None, "cuda_aware": aware}
    table = support_by_device(dict.fromkeys(("gloo", "nccl", "mpi", "shm"), there), gpu=True)
    assert table["all_reduce"]["mpi GPU"] == ("native" if aware else "staged")


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


def test_the_communicator_of_a_destroyed_group_is_freed() -> None:
    freed = []
    communicator = MagicMock(Free=lambda: freed.append("freed"))
    communicator.Get_rank.return_value, communicator.Get_size.return_value = 0, 1
    mpi = MagicMock(Is_finalized=lambda: False)
    group = MpiProcessGroup(mpi, communicator, False, timedelta(seconds=1))
    group.shutdown()
    assert freed == ["freed"]
    mpi.Is_finalized = lambda: True
    group.shutdown()
    assert freed == ["freed"]
