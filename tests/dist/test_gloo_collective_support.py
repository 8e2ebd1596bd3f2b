"""Tests that gloo's column in the tables of `windlass env` matches trials of each collective on two ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.dist.harness import run_ranks
from windlass.observe.environment.backend_support import OPERATORS, collective_support, operator_support


def _calls(rank: int) -> dict[str, Callable[[], object]]:
    def four() -> torch.Tensor:
        return torch.ones(4)

    def send_or_receive(source: int | None) -> object:
        return dist.send(four(), 1) if rank == 0 else dist.recv(four(), source)

    first = rank == 0
    return {
        "broadcast": lambda: dist.broadcast(four(), 0),
        "reduce": lambda: dist.reduce(four(), 0),
        "all_reduce": lambda: dist.all_reduce(four()),
        "gather": lambda: dist.gather(four(), [four(), four()] if first else None, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.ones(8), four()),
        "scatter": lambda: dist.scatter(four(), [four(), four()] if first else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(2), four()),
        "all_to_all": lambda: dist.all_to_all([four(), four()], [four(), four()]),
        "send": lambda: send_or_receive(0),
        "recv": lambda: send_or_receive(0),
        "recv (any source)": lambda: send_or_receive(None),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
    }


def what_works() -> list[str]:
    works = []
    for name, start in _calls(dist.get_rank()).items():
        try:
            start()
        except (RuntimeError, NotImplementedError, ValueError):  # ValueError: monitored_barrier on other back ends
            continue
        works.append(name)
    for name in OPERATORS:
        bits = name in ("BAND", "BOR", "BXOR")
        try:
            dist.all_reduce(torch.ones(4, dtype=torch.int64 if bits else torch.float32), getattr(dist.ReduceOp, name))
        except (RuntimeError, TypeError):
            continue
        works.append(name)
    return works


def test_gloo_column_matches_gloo() -> None:
    expected = [
        name for table in (collective_support(), operator_support()) for name, have in table.items() if have["gloo"]
    ]
    for works in run_ranks(what_works, 2, transport="gloo"):
        # some versions of PyTorch also support averages over gloo
        assert [name for name in works if name in expected or name != "AVG"] == expected
