"""Tests that several ranks round a model as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.causal_models import VOCABULARY, build
from tests.compress.test_block_calibration import Experts
from tests.dist.harness import run_ranks
from windlass.base.errors import ConfigError
from windlass.comm.rank_group import world_group
from windlass.compress.block_calibration import CalibratedBlock
from windlass.compress.post_training import RoundingOptions, compress_directory


def text() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return list(torch.randint(0, VOCABULARY, (6, 24)).split(1))


def compress(source: str, target: str, stops: bool = False) -> list[str]:
    torch.set_num_threads(1)
    group = world_group()

    def progress(done: int, total: int) -> None:
        if stops:
            raise KeyboardInterrupt

    options = RoundingOptions("gptq")
    try:
        with_group = None if group.size == 1 else group
        _, results = compress_directory(
            source, target, "int4_g32", options, batches=text(), group=with_group, progress=progress
        )
    except KeyboardInterrupt:
        return []
    return [one.name for one in results]


def too_few(source: str, target: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compress_directory(source, target, "int4_g32", RoundingOptions("gptq"), batches=text()[:1], group=world_group())
    return str(caught.value)


def test_two_ranks_write_the_directory_of_one(tmp_path: Path) -> None:
    build("llama", 3, hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "wide")
    source = str(tmp_path / "wide")
    names = run_ranks(compress, 1, source, str(tmp_path / "one"))[0]
    assert run_ranks(compress, 2, source, str(tmp_path / "two"), True) == [[], []]
    for found in run_ranks(compress, 2, source, str(tmp_path / "two")):
        assert found == names[7:], "the block that the interrupted run completed is not rounded again"
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    for message in run_ranks(too_few, 2, source, str(tmp_path / "three")):
        assert "1 batches of text are fewer than 2 ranks" in message


def experts() -> tuple[list[list[str]], dict[str, int]]:
    torch.manual_seed(0)
    group = world_group()
    hidden = torch.randn(1, 3, 4)
    hidden[..., 0] = 1 - 2 * group.index  # each rank reaches another expert
    block = CalibratedBlock("layers.0", Experts(), [hidden], [((), {})], group)
    with torch.no_grad():
        groups = block.groups()
        statistics = block.statistics([one.names[0] for one in groups])
    return [one.names for one in groups], {name: one.rows for name, one in statistics.items()}


def test_ranks_that_reach_different_experts_calibrate_the_same_layers() -> None:
    one, two = run_ranks(experts, 2)
    assert one == two
    assert one[1] == {
        "gate": 6,
        "experts.0.gate": 3,
        "experts.0.down": 3,
        "experts.1.gate": 3,
        "experts.1.down": 3,
        "last": 6,
    }
