"""ms-swift as it is: its losses with windlass in the place of DeepSpeed are those without either.

Versions: ms-swift 4.6.0.dev0 (3602360), transformers 5.16.1, trl 0.29.1, peft 0.20.0.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.harness import Client, client, tiny_llama, words

NEEDS = (
    "'transformers<5.17' 'trl<1.0' 'peft<0.21' 'datasets<4.8.5' addict attrdict binpacking charset_normalizer dacite "
    "einops fastapi json_repair modelscope nltk openai rouge scipy sentencepiece simplejson sortedcontainers tiktoken "
    "uvicorn zstandard transformers_stream_generator requests importlib_metadata"
)
STEPS = 4


@pytest.fixture(scope="module")
def swift() -> Client:
    return client("MS_SWIFT", "https://github.com/modelscope/ms-swift", NEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("swift")
    tiny_llama(made / "model")
    rows = [
        {"messages": [{"role": "user", "content": words(n, 4)}, {"role": "assistant", "content": words(n + 3, 6)}]}
        for n in range(16)
    ]
    (made / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def losses(swift: Client, folder: Path, tuner: str, config: str | None, ranks: int) -> list[float]:
    """Losses of the first steps."""
    out = folder / f"{tuner}-{config}-{ranks}"
    options = {
        "model": folder / "model",
        "model_type": "llama",
        "template": "dummy",
        "tuner_type": tuner,
        "dataset": folder / "data.jsonl",
        "dataset_shuffle": "false",
        "train_dataloader_shuffle": "false",
        "split_dataset_ratio": 0,
        "torch_dtype": "float32",
        "max_length": 64,
        "per_device_train_batch_size": 4 // max(ranks, 1),
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": "false",
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "warmup_ratio": 0,
        "logging_steps": 1,
        "logging_first_step": "true",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": "true",
        "dataloader_num_workers": 0,
        "add_version": "false",
        "output_dir": out,
        **({"deepspeed": config} if config else {}),
    }
    spoken = [word for name, value in options.items() for word in (f"--{name}", value)]
    swift.run("swift/cli/sft.py", *spoken, ranks=ranks, path=(swift.folder,), MODELSCOPE_OFFLINE="1")
    lines = map(json.loads, (out / "logging.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def plain(swift: Client, folder: Path) -> Callable[[str], list[float]]:
    """Losses of one plain process, by tuner."""

    @functools.cache
    def get(tuner: str) -> list[float]:
        return losses(swift, folder, tuner, None, 0)

    return get


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("config", ["zero3", "zero2"])
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_losses_are_those_without_deepspeed(
    swift: Client, folder: Path, plain: Callable[[str], list[float]], tuner: str, config: str, ranks: int
) -> None:
    wanted, found = plain(tuner), losses(swift, folder, tuner, config, ranks)
    assert len(wanted) == STEPS and wanted[0] != wanted[-1]
    assert found == pytest.approx(wanted, abs=1.01e-4)
