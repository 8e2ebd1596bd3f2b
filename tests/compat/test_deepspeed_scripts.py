"""Tests that classic scripts with `import deepspeed` train under windlass as in plain PyTorch and in DeepSpeed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.compat.conftest import ROOT, launch
from tests.compat.conftest import start as started

EXAMPLES = ROOT / "examples" / "deepspeed"
HELLO = EXAMPLES / "hello_world" / "hello_world.py"
CLASSIFIER = EXAMPLES / "image_classifier" / "train.py"
LLAMA = EXAMPLES / "llama" / "main.py"
TOUR = EXAMPLES / "features" / "tour.py"
_HELLO = ("--deepspeed", "--deepspeed_config", HELLO.parent / "ds_config.json", "--epochs", 3, "--samples", 256)
_CLASSIFIER = ("--deepspeed", "--epochs", 3)
_LLAMA = ("--train_samples", 48, "--eval_samples", 8)

Numbers = list[tuple[str, ...]]


def start(script: Path, *arguments: object, ranks: int = 1) -> str:
    """Run an example under windlass."""
    return started(script, *arguments, ranks=ranks)


def launched(script: Path, *arguments: object, ranks: int = 1) -> str:
    """Run an example by `windlass run`. Return its output without the launcher's rank labels."""
    return re.sub(r"^\[rank \d+\] ", "", launch(script, *arguments, ranks=ranks), flags=re.M)


def numbers(said: str) -> Numbers:
    """Return the numbers of every line with a loss, a rate, a perplexity or an accuracy."""
    lines = [line for line in said.splitlines() if re.match(r"(step \d|\[ *\d+, |ppl:|accuracy)", line)]
    return [tuple(re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", line)) for line in lines]


def losses(said: str) -> dict[int, float]:
    """Return the losses by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)", said, re.M)}


def perplexities(said: str) -> list[float]:
    """Return the perplexities in the order of the output."""
    return [float(result) for result in re.findall(r"^ppl: (\S+),", said, re.M)]


def assert_same(found: Numbers, wanted: Numbers, tolerance: float = 1e-4) -> None:
    """Assert that both have the same lines, with numbers within `tolerance` of each other."""
    assert wanted and [len(line) for line in found] == [len(line) for line in wanted]
    for item, other in zip(found, wanted, strict=True):
        values = [[float(value) for value in line] for line in (item, other)]
        assert values[0] == pytest.approx(values[1], rel=tolerance, abs=tolerance)


def plainly(script: Path, *arguments: object) -> str:
    """Run an example in plain PyTorch, with `plain/deepspeed` as its `deepspeed` module."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent / "plain")}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("launches", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["forked", "launched"])
def test_hello_world_trains_as_plain_pytorch_and_resumes(launches: bool, tmp_path: Path) -> None:
    """Two ranks print plain PyTorch's losses, also after they end at step 12 and resume from the checkpoint of step 10.

    The quick case forks its ranks; `test_accelerate` and the tests of the launcher start them as users do.
    """
    plain = plainly(HELLO, *_HELLO)
    begin = launched if launches else start
    begun = begin(HELLO, *_HELLO, "--save_dir", tmp_path, "--save_interval", 5, "--stop_after", 12, ranks=2)
    assert_same(numbers(begun), numbers(plain)[:12])
    resumed = start(HELLO, *_HELLO, "--load_dir", tmp_path, ranks=2)
    assert "resumed at step 10" in resumed
    expected = {step: loss for step, loss in losses(plain).items() if step > 10}
    assert losses(resumed) == pytest.approx(expected, abs=1e-4)
    assert losses(plain)[24] < 0.7 * losses(plain)[1]


@pytest.mark.slow
def test_classifier_trains_as_plain_pytorch() -> None:
    """Losses of each step and accuracies equal plain PyTorch's, at stage 2 on 2 ranks."""
    plain = plainly(CLASSIFIER, *_CLASSIFIER)
    assert_same(numbers(start(CLASSIFIER, *_CLASSIFIER, "--stage", 2, ranks=2)), numbers(plain), 5e-4)
    assert float(re.findall(r"accuracy (\S+) %", plain)[0]) > 70


@pytest.mark.slow
def test_classifier_with_experts_is_equal_under_any_expert_sharding() -> None:
    """Losses and accuracies are equal on one rank, and on two with replicated or distributed experts.

    No expert is over capacity here, because ranks that split a batch differently would drop different tokens.
    """
    requested = (*_CLASSIFIER, "--moe", "--num-experts", 2, 4, "--mlp-type", "residual", "--min-capacity", 32)
    alone = start(CLASSIFIER, *requested)
    assert_same(
        numbers(start(CLASSIFIER, *requested, "--moe-param-group", "--stage", 1, ranks=2)), numbers(alone), 5e-4
    )
    spread = (*requested, "--moe-param-group", "--ep-world-size", 2)
    for stage in (0, 2):
        assert_same(numbers(start(CLASSIFIER, *spread, "--stage", stage, ranks=2)), numbers(alone), 5e-4)
    assert float(re.findall(r"accuracy (\S+) %", alone)[0]) > 60


@pytest.mark.slow
def test_hello_world_on_one_rank() -> None:
    """One rank prints plain PyTorch's losses."""
    assert_same(numbers(start(HELLO, *_HELLO)), numbers(plainly(HELLO, *_HELLO)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_classifier_at_every_stage(stage: int, ranks: int) -> None:
    """Losses and accuracies equal plain PyTorch's at every stage; bf16 reaches an accuracy above 70 %."""
    plain = plainly(CLASSIFIER, *_CLASSIFIER)
    assert_same(numbers(start(CLASSIFIER, *_CLASSIFIER, "--stage", stage, ranks=ranks)), numbers(plain), 5e-4)
    text = start(CLASSIFIER, *_CLASSIFIER, "--stage", stage, "--dtype", "bf16", ranks=ranks)
    assert float(re.findall(r"accuracy (\S+) %", text)[0]) > 70


@pytest.fixture
def llama(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs the fine-tuning example in its own folder."""

    def run(*arguments: object, ranks: int = 1, out: str = "out") -> str:
        return start(LLAMA, "--output_dir", tmp_path / out, *_LLAMA, *arguments, ranks=ranks)

    return run


def test_llama_fine_tuning(llama: Callable[..., str], tmp_path: Path) -> None:
    """Stage 3 with host offload, recomputation and a streamed dataset has the losses of stage 0.

    The saved model has the same perplexity, loads as a plain model, and has a row for the padding token.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = llama("--stream", "--compare_saved", ranks=2, out="plain")
    far = ("--zero_stage", 3, "--offload", "--gradient_checkpointing", "--enable_tensorboard")
    text = llama("--stream", "--compare_saved", *far, "--tensorboard_path", tmp_path / "board", ranks=2)
    assert_same(numbers(text), numbers(plain))
    seen = perplexities(text)
    assert seen[2] < 0.7 * seen[0]
    assert seen[3] == pytest.approx(seen[2], rel=1e-4)
    assert list((tmp_path / "board").rglob("events.out.tfevents.*"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "final")
    assert tokenizer.pad_token == "[PAD]"
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / out / "final").state_dict() for out in ("plain", "out")]
    assert weights[0]["lm_head.weight"].shape[0] % 8 == 0 and weights[0]["lm_head.weight"].shape[0] >= len(tokenizer)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("away", [(), ("--offload",)], ids=["device", "host"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_llama_resumes_from_a_checkpoint(llama: Callable[..., str], ranks: int, stage: int, away: tuple[str]) -> None:
    """At every stage and from either tier, a run that stops within an epoch resumes with the losses of stage 0."""
    every = ("--gradient_accumulation_steps", 2, *away)
    order = ("--stream",) if stage % 2 else ()
    plain = llama(*every, *order, ranks=ranks, out="plain")
    options = (*every, *order, "--zero_stage", stage, "--save_steps", 4)
    llama(*options, "--max_train_steps", 5, ranks=ranks)
    resumed = llama(*options, "--resume_from", llama_checkpoints(llama), ranks=ranks)
    expected = {step: loss for step, loss in losses(plain).items() if step > 4}
    assert expected and losses(resumed) == pytest.approx(expected, abs=1e-4)
    assert perplexities(resumed)[-1] == pytest.approx(perplexities(plain)[-1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("far", [(), ("--offload",)], ids=["device", "host"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_llama_fine_tuning_in_16_bits(llama: Callable[..., str], dtype: str, stage: int, far: tuple[str]) -> None:
    """The first loss is within 1 % of float32's, the last perplexity within 10 %: fp16's loss scale may skip steps."""
    wide = llama("--stream", ranks=2, out="wide")
    text = llama("--stream", "--dtype", dtype, "--zero_stage", stage, *far, ranks=2)
    seen, expected = perplexities(text), perplexities(wide)
    assert losses(text)[1] == pytest.approx(losses(wide)[1], rel=1e-2)
    assert seen[-1] < 0.8 * seen[0]
    assert seen[-1] == pytest.approx(expected[-1], rel=0.1)


def llama_checkpoints(run: Callable[..., str]) -> Path:
    """Return the checkpoint folder of the fixture's runs."""
    (cell,) = (cell.cell_contents for cell in run.__closure__ or ())
    return Path(cell) / "out" / "checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_tour_script(tmp_path: Path, ranks: int) -> None:
    """Stage 3 with `zero.Init` and recomputation has the losses of stage 0, with accumulation and a one-cycle schedule.

    The monitor's file has the learning rate of each update.
    """
    cycle = ("--schedule", "OneCycle")
    plain = start(TOUR, *cycle, "--stage", 0, ranks=ranks)
    text = start(TOUR, *cycle, "--stage", 3, "--checkpoint_activations", "--monitor_path", tmp_path, ranks=ranks)
    assert_same(numbers(text), numbers(plain))
    rows = (tmp_path / "tour" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rows[0] == "step,lr"
    results = [float(row.split(",")[1]) for row in rows[1:]]
    assert results == pytest.approx([float(rate) for rate in re.findall(r" lr (\S+)", text)], abs=1e-6)


# tests against the installed DeepSpeed

_NO_PEER = importlib.util.find_spec("deepspeed") is None
_SAME: dict[str, tuple[object, ...]] = {
    "hello": (HELLO, *_HELLO),
    "classifier": (CLASSIFIER, *_CLASSIFIER, "--stage", 2),
    "classifier-3": (CLASSIFIER, *_CLASSIFIER, "--stage", 3),
    "llama-0": (LLAMA, *_LLAMA),
    "llama-2-host": (LLAMA, *_LLAMA, "--zero_stage", 2, "--offload"),
    "llama-3-accumulated": (LLAMA, *_LLAMA, "--zero_stage", 3, "--stream", "--gradient_accumulation_steps", 2),
    "tour": (TOUR, "--stage", 2, "--schedule", "OneCycle"),
    "tour-3": (TOUR, "--stage", 3, "--checkpoint_activations"),
}


def in_deepspeed(script: Path, *arguments: object, ranks: int) -> str:
    """Run an example with the installed DeepSpeed."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    env |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])}  # ninja builds DeepSpeed's code
    command = [*launch, str(script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.peer
@pytest.mark.skipif(_NO_PEER, reason="deepspeed is not installed: pip install deepspeed==0.19.8")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", _SAME)
def test_deepspeed_prints_the_same(tmp_path: Path, name: str, ranks: int) -> None:
    """The same script and seed print the same losses, rates, norms and accuracies in DeepSpeed."""
    script, *arguments = _SAME[name]
    if script == LLAMA:
        arguments += ["--output_dir", tmp_path]
    expected = in_deepspeed(Path(str(script)), *arguments, ranks=ranks)
    assert_same(numbers(start(Path(str(script)), *arguments, ranks=ranks)), numbers(expected), 2e-4)
