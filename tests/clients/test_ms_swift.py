"""ms-swift as it is: its losses with windlass as DeepSpeed are those without DeepSpeed.

Versions: ms-swift 4.6.0.dev0 (3602360), transformers 5.16.1, trl 0.29.1, peft 0.20.0.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.harness import Client, client, tiny_llama
from tests.clients.trainers import Comparison, Losses, conversations, options

NEEDS = (
    "'transformers<5.17' 'trl<1.0' 'peft<0.21' 'datasets<4.8.5' addict attrdict binpacking charset_normalizer dacite "
    "einops fastapi json_repair modelscope nltk openai rouge scipy sentencepiece simplejson sortedcontainers tiktoken "
    "uvicorn zstandard transformers_stream_generator requests importlib_metadata"
)


@pytest.fixture(scope="module")
def swift() -> Client:
    return client("MS_SWIFT", "https://github.com/modelscope/ms-swift", NEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("swift")
    tiny_llama(made / "model")
    rows = [
        {"messages": [{"role": "user", "content": requested}, {"role": "assistant", "content": answer}]}
        for requested, answer, _ in conversations()
    ]
    (made / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return made


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def comparison(swift: Client, folder: Path) -> Comparison:
    def losses(tuner: str, config: str | None, ranks: int) -> Losses:
        out = folder / f"{tuner}-{config}-{ranks}"
        settings = {
            **options(out, ranks),
            "model": folder / "model",
            "model_type": "llama",
            "template": "dummy",
            "tuner_type": tuner,
            "dataset": folder / "data.jsonl",
            "dataset_shuffle": False,
            "train_dataloader_shuffle": False,
            "split_dataset_ratio": 0,
            "torch_dtype": "float32",
            "fp16": False,  # default for float32 is True: fp16 weights under DeepSpeed, else autocast
            "bf16": False,
            "lora_dropout": 0,  # each rank would draw its own masks
            "max_length": 64,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": False,
            "warmup_ratio": 0,
            "logging_first_step": True,
            "add_version": False,
            **({"deepspeed": config} if config else {}),
        }
        spoken = [word for name, value in settings.items() for word in (f"--{name}", _word(value))]
        swift.run("swift/cli/sft.py", *spoken, ranks=ranks, path=(swift.folder,), MODELSCOPE_OFFLINE="1")
        lines = map(json.loads, (out / "logging.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    return Comparison(losses)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("config", ["zero3", "zero2"])
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_losses_equal_plain_training(comparison: Comparison, tuner: str, config: str, ranks: int) -> None:
    comparison.check(tuner, config, ranks)
