"""Tests of `windlass verify` as a program, for an unchanged script and for a model given by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.cli.main import main

SCRIPT = """
import argparse
import torch
import windlass
from torch import nn

parser = windlass.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--lr", type=float, required=True)
given = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(29, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids)
        for layer in [*self.layers, self.layers[0]]:
            h = h + self.drop(torch.tanh(layer(h)))
        return nn.functional.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.randint(0, 29, (6,), generator=torch.Generator().manual_seed(index))


net = Net()
rule = torch.optim.AdamW(net.parameters(), lr=given.lr)
schedule = torch.optim.lr_scheduler.LambdaLR(rule, lambda step: 1 / (1 + step))
engine, _, loader, _ = windlass.initialize(
    args=given, model=net, optimizer=rule, training_data=Data(), lr_scheduler=schedule
)
print("this does not stand between the lines of the verdict")
for ids in loader:
    engine.backward(engine(ids))
    engine.step()
raise SystemExit("the script was not ended after its steps")
"""

FAULTY = """
from unittest.mock import patch
from windlass.comm import shm_transport
whole = shm_transport.ordered_sum
patch.object(shm_transport, "ordered_sum", lambda parts, out, **how: whole([parts[1]], out, **how)).start()
"""

DEEPSPEED_SCRIPT = """
import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam
from torch import nn

net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(model=net, optimizer=FusedAdam(net.parameters()), config=config)
assert type(engine) is deepspeed.DeepSpeedEngine and "compat" in type(engine).__module__, type(engine)
while True:
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
"""

MODEL = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().mean()

def net():
    return Net()

class Slow(Net):
    def forward(self, x):
        time.sleep(0.8)
        return super().forward(x)

def slow():
    return Slow()

def batch(step, micro, rank):
    return torch.full((2, 8), 1.0 + step + 10 * micro + 100 * rank),
"""


def config(stage: int, **more: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "faulty.py").write_text(FAULTY + SCRIPT)
    (tmp_path / "named_model.py").write_text(MODEL)
    (tmp_path / "ds.json").write_text(json.dumps(config(3)))
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    (tmp_path / "adam.json").write_text(json.dumps(config(2, optimizer=adam)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verify(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments])
    return int(ended.value.code or 0)


def test_unmodified_script_is_verified(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify("script.py", "--lr", "0.01", "--config", "ds.json", "--steps", "2", "--alone") == 0
    text = capfd.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("plain PyTorch in one process, beside 2 ranks, stage 3, ")
    assert "2 micro-batches a rank and step" in lines[0] and "this does not stand" not in text
    assert lines[-1] == "equal: 2 steps, every phase within its bound"
    first, second = (line.split() for line in lines[4:6])
    assert first[0] == "1" and second[0] == "2" and len(first) == 10
    assert first[1] == first[2] == first[8] and float(second[9]) < 1e-4, "the copy that trains alone stays near"


def test_engine_of_a_deepspeed_script_is_verified(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "deepspeed_script.py").write_text(DEEPSPEED_SCRIPT)
    assert verify("deepspeed_script.py", "--nproc", "1", "--steps", "1", "--json") == 0
    (found,) = json.loads(capfd.readouterr().out)
    assert found["equal"] and len(found["steps"]) == 1 and found["stage"] == 2


@pytest.mark.slow
def test_fault_is_reported_as_text_and_json(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify("faulty.py", "--lr", "0.01", "--config", "ds.json") == 1
    text = capfd.readouterr().out
    assert "NOT equal: first difference: step 1, phase reduce" in text
    assert "embed.weight (gradient after the reduction)" in text and "it contains only rank 1's part" in text
    assert verify("faulty.py", "--lr", "0.01", "--config", "ds.json", "--json", "--nproc", "1,2") == 1
    alone, together = json.loads(capfd.readouterr().out)
    assert alone["ranks"] == 1 and together["ranks"] == 2
    assert not together["equal"] and together["deviations"][0]["phase"] == "reduce"


@pytest.mark.slow
def test_script_that_ends_before_the_requested_steps(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A script may end early with `SystemExit(0)`, as `sys.exit(main())` does."""
    source = SCRIPT.replace(
        "    engine.step()\n", "    engine.step()\n    if engine.global_steps == 2: raise SystemExit(0)\n"
    )
    (folder / "short.py").write_text(source)
    assert verify("short.py", "--lr", "0.01", "--config", "ds.json") == 0
    text = capfd.readouterr().out
    assert "the script ended after 2 of 5 steps" in text and "equal: 2 steps" in text
    (folder / "short.py").write_text(source.replace("SystemExit(0)", "SystemExit(3)"))
    assert verify("short.py", "--lr", "0.01", "--config", "ds.json") == 1
    assert "SystemExit: 3" in capfd.readouterr().err


@pytest.mark.slow
def test_model_by_name(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    named = ["--model", "named_model:net", "--config", "adam.json", "--nproc", "1,2", "--steps", "3", "--json"]
    assert verify(*named, "--batch", "named_model:batch") == 0
    alone, together = json.loads(capfd.readouterr().out)
    assert alone["equal"] and together["equal"] and len(together["steps"]) == 3
    assert alone["steps"][0]["loss"] != together["steps"][0]["loss"], "every rank has its own batches"
    assert verify(*named) == 1
    assert "has no config.vocab_size to generate tokens from; give --batch" in capfd.readouterr().err


@pytest.mark.slow
def test_slow_plain_run_is_no_hang(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A slow plain run is not reported as a hang.

    Rank 0 repeats the forwards of all ranks one after the other while the others wait.
    """
    patience = {"report_after_s": 4, "timeout_s": 4}
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    (folder / "patience.json").write_text(
        json.dumps(config(2, optimizer=adam, watchdog=patience, gradient_accumulation_steps=4))
    )
    named = ["--model", "named_model:slow", "--batch", "named_model:batch", "--config", "patience.json"]
    assert verify(*named, "--nproc", "3", "--steps", "1") == 0
    text = capfd.readouterr()
    assert "equal: 1 step" in text.out and "hang report" not in text.err


@pytest.mark.slow
def test_a_hugging_face_configuration(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    ).save_pretrained(folder / "llama")
    assert verify("--model", "llama", "--batch", "2x8", "--config", "adam.json", "--steps", "2") == 0
    assert "equal: 2 steps" in capfd.readouterr().out


@pytest.mark.slow
def test_incomparable_runs_are_reported(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "empty.py").write_text("print('nothing')")
    (folder / "broken.py").write_text("raise ValueError('the data are gone')")
    assert verify("empty.py") == 1
    assert "ended without an engine that has an optimizer" in capfd.readouterr().err
    assert verify("broken.py") == 1
    assert "ValueError: the data are gone" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "missing or given twice"),
        (("script.py", "--model", "x"), "missing or given twice"),
        (("nowhere.py",), "no such script: nowhere.py"),
        (("--model", "x"), "--model needs --config"),
        (("script.py", "--batch", "2x8"), "--batch needs --model"),
        (("script.py", "--nproc", "2,x"), "--nproc is '2,x'"),
        (("--nprocs", "4", "script.py"), "no such option: --nprocs"),
        (("--model", "x", "--config", "ds.json", "--step", "3"), "no such option: --step"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], said: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert verify(*arguments) == 1
    assert said in capfd.readouterr().err
