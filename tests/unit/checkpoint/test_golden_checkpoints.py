"""Tests that checkpoints of earlier releases stay loadable, and that their format is still the current one."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.unit.checkpoint import sample_states
from windlass.checkpoint import load, read_full
from windlass.checkpoint.checkpoint_index import FORMAT_VERSION, encode_index, parse_index

GOLDEN = Path(__file__).parents[2] / "data" / "checkpoint_v1"


def test_a_version_1_checkpoint_of_two_ranks_loads_in_one_process() -> None:
    into = sample_states.empty()
    loaded = load(GOLDEN, None, into)
    sample_states.assert_loaded(into)
    assert loaded.tag == "global_step12" and loaded.saved_world_size == 2
    assert loaded.plain == sample_states.state(0, 2).plain
    assert loaded.rank_plain is not None and torch.equal(loaded.rank_plain["rng"], torch.zeros(3, dtype=torch.uint8))
    assert dict(read_full(GOLDEN))["param/conv"].equal(sample_states.whole("param/conv"))


def test_index_is_written_in_the_format_of_version_1() -> None:
    path = GOLDEN / "global_step12" / "checkpoint.json"
    text = path.read_text()
    assert FORMAT_VERSION == 1
    assert encode_index(parse_index(text, path)) == text
