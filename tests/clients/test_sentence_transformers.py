"""sentence-transformers' trainer: its losses with windlass as DeepSpeed are those without DeepSpeed.

Versions: sentence-transformers 6.2.0, with transformers 5.23.0, accelerate 1.15.0.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.harness import Client, client, words
from tests.ports import free_port

NEEDS = "sentence-transformers"
STEPS = 5
BATCH = 8

# Program from the documentation of sentence-transformers, for the model that `make` writes.
SCRIPT = """
import json, sys
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses, modules

rows, out, config, loss = json.load(open("rows.json")), sys.argv[1], sys.argv[2], sys.argv[3]
options = {{"deepspeed": config}} if config != "none" else {{"ddp_backend": "gloo"}} if sys.argv[4] != "1" else {{}}
args = SentenceTransformerTrainingArguments(
    output_dir=out,
    max_steps={steps},
    per_device_train_batch_size={batch} // int(sys.argv[4]),
    learning_rate=2e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    seed=1,
    **options,
)
word = modules.Transformer("model", max_seq_length=16)
model = SentenceTransformer(modules=[word, modules.Pooling(32, "mean")], device="cpu")
kinds = {{
    "ranking": (losses.MultipleNegativesRankingLoss(model), ["anchor", "positive"]),
    "cosine": (losses.CoSENTLoss(model), ["anchor", "positive", "score"]),
}}
made, columns = kinds[loss]
data = Dataset.from_dict({{name: rows[name] for name in columns}})
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=data, loss=made)
trainer.train()
if trainer.is_world_process_zero():
    trainer.state.save_to_json(out + ".json")
"""

AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
HOST = {"device": "cpu", "pin_memory": False}
CONFIGS = {
    "z2": {"stage": 2},
    "z3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "z3-offload": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}


@pytest.fixture(scope="module")
def sentences() -> Client:
    return client("SENTENCE_TRANSFORMERS", "https://github.com/huggingface/sentence-transformers", NEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sentences"))


def make(made: Path) -> Path:
    """Write a tiny BERT, pairs of sentences, the script and the configurations."""
    import torch
    from transformers import BertConfig, BertModel

    from windlass.data.tokenizer import train_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    train_tokenizer([words(n, 20) for n in range(10)], 300, made / "model")
    BertModel(BertConfig(vocab_size=300, pad_token_id=1, initializer_range=0.1, **sizes)).save_pretrained(
        made / "model"
    )
    count = range(STEPS * BATCH)
    rows = {
        "anchor": [words(n, 4) for n in count],
        "positive": [words(n + 3, 5) for n in count],
        "score": [n % 5 / 4 for n in count],
    }
    (made / "rows.json").write_text(json.dumps(rows))
    (made / "script.py").write_text(SCRIPT.format(steps=STEPS, batch=BATCH))
    for name, zero in CONFIGS.items():
        (made / f"{name}.json").write_text(json.dumps({**AUTO, "zero_optimization": zero}))
    return made


def losses(sentences: Client, folder: Path, loss: str, config: str | None, ranks: int) -> list[float]:
    """Return the losses of the first steps. Without DeepSpeed, several ranks use DistributedDataParallel."""
    out = f"{loss}-{config}-{ranks}"
    here = replace(sentences, folder=folder)
    spoken = ("script.py", out, f"{config}.json" if config else "none", loss, ranks)
    home = str(folder / f"home-{out}")
    if config is not None:
        here.run(*spoken, ranks=ranks, HF_HOME=home)
    elif ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", free_port())
        here.run(*launcher, *spoken, HF_HOME=home)
    else:
        here.run(*spoken, HF_HOME=home)
    state = json.loads((folder / f"{out}.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def plain(sentences: Client, folder: Path) -> Callable[[str, int], list[float]]:
    """Return the losses without DeepSpeed, by loss function and number of ranks."""
    return functools.cache(lambda loss, ranks: losses(sentences, folder, loss, None, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("loss", ["ranking", "cosine"])
def test_losses_equal_plain_training(
    sentences: Client, folder: Path, plain: Callable[[str, int], list[float]], loss: str, config: str, ranks: int
) -> None:
    expected, actual = plain(loss, ranks), losses(sentences, folder, loss, config, ranks)
    print(f"{loss} {config} on {ranks}: {actual}, plainly {expected}")
    assert len(expected) == STEPS and len(set(expected)) == STEPS
    assert actual == pytest.approx(expected, abs=1.01e-4)
