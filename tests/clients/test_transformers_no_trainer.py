"""transformers' example scripts without its Trainer: losses with windlass as DeepSpeed are those without DeepSpeed.

Versions: the scripts of transformers d6a6c82 (5.0.0.dev0), with transformers 5.23.0, accelerate 1.15.0, datasets 5.2.0,
evaluate 0.4.6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.clients.harness import Client, client
from tests.clients.test_transformers_examples import (
    BATCH,
    NEEDS,
    make_swag,
    prepare,
    sentence_pairs,
    text_model,
    tiny_bert,
    write_rows,
)
from tests.ports import free_port

EPOCHS = 4
# The scripts do not clip gradients. Accelerate and DeepSpeed may clip them, unless the configuration sets 0.
AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
HOST = {"device": "cpu", "pin_memory": False}
CONFIGS = {
    "z2": {"stage": 2},
    "z2-offload": {"stage": 2, "offload_optimizer": HOST},
    "z3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "z3-offload": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": HOST,
        "offload_param": HOST,
    },
}


@dataclass(frozen=True)
class Script:
    """Script, the function that writes its model and data, and its options."""

    path: str
    make: Callable[[Path], None]
    options: dict[str, object] = field(default_factory=dict)


def split(folder: Path) -> None:
    """Keep training rows for two steps, and validation rows for one."""
    rows = (folder / "train.json").read_text().splitlines()
    (folder / "train.json").write_text("\n".join(rows[: 2 * BATCH]))
    (folder / "validation.json").write_text("\n".join(rows[:BATCH]))


def make_choices(folder: Path) -> None:
    make_swag(folder)
    split(folder)


def make_pairs(folder: Path) -> None:
    from transformers import BertForSequenceClassification

    text_model(folder / "model", BertForSequenceClassification(tiny_bert(num_labels=3)))
    write_rows(folder / "train.json", sentence_pairs())
    split(folder)


SCRIPTS = {
    "swag": Script("multiple-choice/run_swag_no_trainer.py", make_choices, {"max_seq_length": 24}),
    "glue": Script("text-classification/run_glue_no_trainer.py", make_pairs, {"max_length": 24}),
}


@pytest.fixture(scope="module")
def examples() -> Client:
    return client("TRANSFORMERS", "https://github.com/huggingface/transformers", NEEDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folders with the model and the data of each script."""
    configs = {
        name: {**AUTO, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
        for name, zero in CONFIGS.items()
    }
    return functools.cache(lambda name: prepare(tmp_path_factory.mktemp(name), SCRIPTS[name].make, configs))


def losses(examples: Client, folder: Path, name: str, config: str | None, ranks: int) -> list[float]:
    """Return the mean loss of each epoch from the script's TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script = SCRIPTS[name]
    out = folder / f"{config}-{ranks}"
    options = {
        "model_name_or_path": "model",
        "output_dir": out,
        "train_file": "train.json",
        "validation_file": "validation.json",
        "per_device_train_batch_size": BATCH // ranks,
        "per_device_eval_batch_size": BATCH // ranks,
        "num_train_epochs": EPOCHS,
        "learning_rate": 2e-3,
        "seed": 1,
        "report_to": "tensorboard",
        **script.options,
    }
    spoken = [word for option, value in options.items() for word in (f"--{option}", value)] + ["--with_tracking"]
    path = examples.folder / "examples" / "pytorch" / script.path
    here = replace(examples, folder=folder)
    env = {"HF_HOME": str(folder / f"home-{config}-{ranks}")}
    if config is not None:
        launcher = ("-m", "accelerate.commands.launch", "--num_processes", ranks, "--num_machines", 1)
        launcher += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", free_port())
        started: tuple[object, ...] = (*launcher, "--use_deepspeed", "--deepspeed_config_file", f"{config}.json")
        here.run(*started, path, *spoken, stands_in=True, **env)
    else:  # `accelerate launch --cpu` starts only one process
        started = ("-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-port", free_port())
        here.run(*started, path, *spoken, ACCELERATE_USE_CPU="true", **env)
    # TensorBoard files of the hyperparameters are in subfolders.
    events = EventAccumulator(str(next(out.glob("*_no_trainer/events*"))))
    events.Reload()
    return [event.value for event in events.Scalars("train_loss")]


@pytest.fixture(scope="module")
def plain(examples: Client, folder: Callable[[str], Path]) -> Callable[[str, int], list[float]]:
    """Return the losses without DeepSpeed, by script and number of ranks."""
    return functools.cache(lambda name, ranks: losses(examples, folder(name), name, None, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_losses_equal_plain_training(
    examples: Client,
    folder: Callable[[str], Path],
    plain: Callable[[str, int], list[float]],
    name: str,
    config: str,
    ranks: int,
) -> None:
    expected, actual = plain(name, ranks), losses(examples, folder(name), name, config, ranks)
    print(f"{name} {config} on {ranks}: {actual}, plainly {expected}")
    assert len(expected) == EPOCHS and len(set(expected)) == EPOCHS
    assert actual == pytest.approx(expected, abs=1.01e-4)
