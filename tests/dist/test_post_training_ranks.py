"""Tests that several ranks round a model as one process does."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

from tests.causal_models import VOCABULARY, build
from tests.compress.test_block_calibration import Experts
from tests.compress.test_compress_command import LINES
from tests.dist.harness import run_ranks
from windlass.base.errors import ConfigError
from windlass.cli.main import main
from windlass.comm.rank_group import world_group
from windlass.compress.block_calibration import CalibratedBlock
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.data.tokenizer import train_tokenizer


def text() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return list(torch.randint(0, VOCABULARY, (6, 24)).split(1))


METHODS = {
    "gptq": RoundingOptions("gptq"),
    "awq": RoundingOptions("awq"),
    "smoothed": RoundingOptions("rtn", smooth=True),
    "hqq": RoundingOptions("hqq"),
    "rotated": RoundingOptions("gptq", rotate=True),
    "sparse": RoundingOptions("gptq", sparsity="2:4"),
}


def compress(source: str, target: str, method: str, stops: bool = False) -> list[str]:
    torch.set_num_threads(1)
    group = world_group()

    def progress(done: int, total: int) -> None:
        if stops:
            raise KeyboardInterrupt

    options = METHODS[method]
    batches = text() if options.needs_text else []
    try:
        with_group = None if group.size == 1 else group
        name = "int8_g32" if options.smooth else "int4_g32"
        _, results = compress_directory(
            source, target, name, options, batches=batches, group=with_group, progress=progress
        )
    except KeyboardInterrupt:
        return []
    return [one.name for one in results]


def too_few(source: str, target: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compress_directory(source, target, "int4_g32", RoundingOptions("gptq"), batches=text()[:1], group=world_group())
    return str(caught.value)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_write_the_directory_of_one(method: str, tmp_path: Path) -> None:
    build("llama", 3, hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "wide")
    source = str(tmp_path / "wide")
    names = run_ranks(compress, 1, source, str(tmp_path / "one"), method)[0]
    assert run_ranks(compress, 2, source, str(tmp_path / "two"), method, True) == [[], []]
    done = 7 if METHODS[method].needs_text else 0
    for found in run_ranks(compress, 2, source, str(tmp_path / "two"), method):
        assert found == names[done:], "the block that the interrupted run completed is not rounded again"
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    for message in run_ranks(too_few, 2, source, str(tmp_path / "three")):
        assert "1 batches of text are fewer than 2 ranks" in message


def command(*arguments: str) -> tuple[object, str]:
    torch.set_num_threads(1)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as ended:
        main(["compress", *arguments])
    return ended.value.code, printed.getvalue()


@pytest.mark.parametrize(
    "words",
    [(), ("--prune", "ffn=0.25"), ("--budget", "size=2x"), ("--prune", "ffn=0.25", "--budget", "loss=5%")],
    ids=" ".join,
)
def test_the_command_runs_over_ranks(words: tuple[str, ...], tmp_path: Path) -> None:
    wide = build("llama", 3, hidden_size=64, intermediate_size=96, vocab_size=300, max_position_embeddings=64)
    wide.save_pretrained(tmp_path / "wide")
    train_tokenizer(LINES, 300, tmp_path / "wide")
    (tmp_path / "text.txt").write_text("\n".join(LINES * 4))
    text = ("--data", str(tmp_path / "text.txt"), "--sequences", "8", "--length", "32", "--no-measure")
    options = (*text, *words) if "--budget" in words else (*text, "--group", "32", *words)
    source = str(tmp_path / "wide")
    command(source, str(tmp_path / "one"), *options)
    (code, first), (other, second) = run_ranks(command, 2, source, str(tmp_path / "two"), *options)
    assert not code and not other, first
    assert " by gptq" in first and "all tensors" in first
    assert "layers" not in second, "only the first rank reports"
    for path in (tmp_path / "one").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    assert not list(tmp_path.glob(".two*"))


def test_the_command_refuses_over_ranks(tmp_path: Path) -> None:
    build("llama", 3, hidden_size=64, intermediate_size=96, vocab_size=300).save_pretrained(tmp_path / "wide")
    train_tokenizer(LINES, 300, tmp_path / "wide")
    (tmp_path / "text.txt").write_text("\n".join(LINES * 4))
    text = ("--data", str(tmp_path / "text.txt"), "--sequences", "8", "--length", "32", "--no-measure")
    arguments = (str(tmp_path / "wide"), str(tmp_path / "no"), *text)
    for code, printed in run_ranks(command, 2, *arguments, "--method", "lkd"):
        assert code == 1 and "(--method) is 'lkd', which runs in one process, and 2 ranks run" in printed
    for code, printed in run_ranks(command, 2, *arguments, "--budget", "size=100x"):
        assert code == 1 and "budget" in printed, "the first rank's refusal reaches the others, which wait"


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
