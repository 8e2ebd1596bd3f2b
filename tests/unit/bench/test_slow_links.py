"""Tests of the arithmetic of the benchmark of slow links."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import typer

from tests.unit.bench.conftest import BENCH


def script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_slow_links", BENCH / "slow_links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks it up
    spec.loader.exec_module(module)
    return module


def test_shares_compare_a_step_with_bytes_over_the_rate_and_with_the_step_without_a_limit() -> None:
    bench = script()
    rate = bench.GOAL_RATE
    ddp = bench.Timing("ddp", rate, 20.0, 1.0, 180 * 2**20, 1.0, 0.5)
    one_bit = bench.Timing("1-bit adam", rate, 4.0, 1.0, 5 * 2**20, 2.0, 0.5)
    assert ddp.at_rate == 18.0 and ddp.of_sum == 0.95 and ddp.of_rate == 0.9
    assert one_bit.at_rate == 0.5 and one_bit.of_sum == 0.625 and one_bit.of_rate == 0.125
    assert bench.factor(one_bit, [ddp, one_bit]) == 5.0 and bench.factor(one_bit, [one_bit]) is None
    assert bench.missed_goals([ddp, one_bit]) == [
        "1-bit adam at 10 MiB/s: 5.0 x as fast as DDP, not 8",
        "1-bit adam at 10 MiB/s: 62% of bytes / rate and free step",
    ]
    assert bench.Timing("ddp", 0, 2.0, 1.0, 1.0, 2.0, 0.5).at_rate == 0.0


def test_methods_are_named_one_by_one() -> None:
    bench = script()
    assert bench.parse_methods("diloco; ddp") == ["ddp", "diloco"]
    assert bench.parse_methods(";".join(bench.ENGINES)) == list(bench.ENGINES)
    with pytest.raises(typer.BadParameter, match="there are ddp"):
        bench.parse_methods("zip")
