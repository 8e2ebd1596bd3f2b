"""LLaMA-Factory as it is: its losses with windlass as DeepSpeed are those without DeepSpeed.

Versions: LLaMA-Factory 0.9.6.dev0 (ff6d4d1), transformers 5.8.0, accelerate 1.11.0, peft 0.18.1, trl 0.24.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import Client, client, tiny_llama
from tests.clients.trainers import Comparison, Losses, conversations, options

NEEDS = (
    "transformers==5.8.0 accelerate==1.11.0 peft==0.18.1 trl==0.24.0 datasets==4.0.0 einops scipy sentencepiece "
    "tiktoken fire omegaconf torchdata==0.11.0 'tyro<0.9' av modelscope uvicorn fastapi sse-starlette"
)

LORA = {"finetuning_type": "lora", "lora_rank": 4}
PREFERENCES = {"pref_beta": 1.0}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft", "dataset": "chat", "finetuning_type": "full"},
    "sft-lora": {"stage": "sft", "dataset": "chat", **LORA},
    "dpo": {"stage": "dpo", "dataset": "pairs", "finetuning_type": "full", **PREFERENCES},
    "dpo-lora": {"stage": "dpo", "dataset": "pairs", **LORA, **PREFERENCES},
    "kto": {"stage": "kto", "dataset": "tagged", "finetuning_type": "full", **PREFERENCES},
    "kto-lora": {"stage": "kto", "dataset": "tagged", **LORA, **PREFERENCES},
}
CONFIGS = {
    "z0": "ds_z0_config.json",
    "z2": "ds_z2_config.json",
    "z3": "ds_z3_config.json",
    "z2-offload": "ds_z2_offload_config.json",
    "z3-offload": "ds_z3_offload_config.json",
}


@pytest.fixture(scope="module")
def factory() -> Client:
    return client("LLAMA_FACTORY", "https://github.com/hiyouga/LLaMA-Factory", NEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Llama with random weights, its tokenizer, and data of each kind. Return the folder."""
    made = tmp_path_factory.mktemp("factory")
    tiny_llama(made / "model")
    data = made / "data"
    data.mkdir()

    rows = conversations()
    chat = [{"instruction": requested, "input": "", "output": answer} for requested, answer, _ in rows]
    pairs = [{**row, "chosen": row["output"], "rejected": worse} for row, (_, _, worse) in zip(chat, rows, strict=True)]
    tagged = [{**row, "label": n % 2 == 0} for n, row in enumerate(chat)]
    columns = {"prompt": "instruction", "query": "input"}
    described = {
        "chat": {"file_name": "chat.json"},
        "pairs": {
            "file_name": "pairs.json",
            "ranking": True,
            "columns": {**columns, "chosen": "chosen", "rejected": "rejected"},
        },
        "tagged": {"file_name": "tagged.json", "columns": {**columns, "response": "output", "kto_tag": "label"}},
    }
    for name, content in {"chat": chat, "pairs": pairs, "tagged": tagged, "dataset_info": described}.items():
        (data / f"{name}.json").write_text(json.dumps(content))
    # LLaMA-Factory imports torchaudio, which is not available for every torch version, and uses it for sound only.
    (made / "path" / "torchaudio").mkdir(parents=True)
    (made / "path" / "torchaudio" / "__init__.py").touch()
    return made


@pytest.fixture(scope="module")
def comparison(factory: Client, folder: Path) -> Comparison:
    def losses(stage: str, config: str | None, ranks: int) -> Losses:
        name = f"{stage}-{config}-{ranks}"
        settings: dict[str, Any] = {
            **STAGES[stage],
            **options(folder / name, ranks),
            "model_name_or_path": str(folder / "model"),
            "dataset_dir": str(folder / "data"),
            "overwrite_cache": True,
            "do_train": True,
            "template": "default",
            "cutoff_len": 64,
            "disable_shuffling": True,
            "seed": 1,
        }
        if config is not None:
            settings["deepspeed"] = str(factory.folder / "examples" / "deepspeed" / CONFIGS[config])
        file = folder / f"{name}.yaml"  # JSON is YAML; LLaMA-Factory fails to read .json files
        file.write_text(json.dumps(settings))
        path = (folder / "path", factory.folder / "src")
        factory.run("src/train.py", file, ranks=ranks, path=path, DISABLE_VERSION_CHECK="1")
        state = json.loads((folder / name / "trainer_state.json").read_text())
        return [entry["loss"] for entry in state["log_history"] if "loss" in entry]

    return Comparison(losses)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("config", ["z3", "z2", "z0", "z2-offload", "z3-offload"])
@pytest.mark.parametrize("stage", STAGES)
def test_losses_equal_plain_training(comparison: Comparison, stage: str, config: str, ranks: int) -> None:
    comparison.check(stage, config, ranks)
