"""Values that transformers' Trainer and accelerate fill in for "auto"."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from windlass.config.batch_sizes import KEYS
from windlass.config.config_problems import ConfigRefusal
from windlass.config.config_refusals import REQUIRED_AUTO_KEYS
from windlass.config.root_config import Config


class Client(StrEnum):
    """Program that fills in "auto" values before `initialize` reads the configuration."""

    TRAINER = "trainer"
    ACCELERATE = "accelerate"
    NONE = "none"


@dataclass(frozen=True)
class AutoValues:
    """The keys at "auto", sorted by how one client treats them."""

    client: Client
    filled: Mapping[str, str]
    """Description of the value that the client writes, by dotted key."""
    defaulted: tuple[str, ...]
    """Keys that the client leaves alone and that have a default."""
    refused: tuple[ConfigRefusal, ...]
    """Keys that the client leaves alone and that have no default, or for which the client itself raises."""

    @property
    def fill_batch(self) -> bool:
        """True if the client fills in at least one of the three batch numbers."""
        return any(key in self.filled for key in KEYS)


CLIENT_NAMES = {Client.TRAINER: "transformers' Trainer", Client.ACCELERATE: "accelerate", Client.NONE: "nobody"}
_FROM_HIDDEN_SIZE = {
    "zero_optimization.reduce_bucket_size": "hidden_size x hidden_size of the model",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 x hidden_size x hidden_size of the model",
    "zero_optimization.stage3_param_persistence_threshold": "10 x hidden_size of the model",
}
_PLUGIN = "of the DeepSpeedPlugin or of accelerate's own configuration"
VALUES_BY_CLIENT: dict[Client, dict[str, str]] = {
    Client.TRAINER: {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "train_batch_size": "ranks x per_device_train_batch_size x gradient_accumulation_steps",
        "gradient_clipping": "max_grad_norm",
        "optimizer.params.lr": "learning_rate",
        "optimizer.params.betas": "[adam_beta1, adam_beta2]",
        "optimizer.params.eps": "adam_epsilon",
        "optimizer.params.weight_decay": "weight_decay",
        "scheduler.params.warmup_min_lr": "0",
        "scheduler.params.warmup_max_lr": "learning_rate",
        "scheduler.params.total_num_steps": "the number of training steps (max_steps)",
        "scheduler.params.warmup_num_steps": "warmup steps (warmup_steps), at least 1",
        "fp16.enabled": "fp16 or fp16_full_eval",
        "bf16.enabled": "bf16 or bf16_full_eval",
        **_FROM_HIDDEN_SIZE,
    },
    Client.ACCELERATE: {
        "train_micro_batch_size_per_gpu": "batch_size of the smallest DataLoader given to prepare()",
        "gradient_accumulation_steps": f"gradient_accumulation_steps {_PLUGIN}",
        "train_batch_size": "micro-batch x gradient_accumulation_steps x ranks / sp",
        "gradient_clipping": f"gradient_clipping {_PLUGIN}, else 1.0",
        "optimizer.params.lr": "lr of DummyOptim",
        "optimizer.params.weight_decay": "weight_decay of DummyOptim",
        "scheduler.params.warmup_min_lr": "0, with DummyScheduler",
        "scheduler.params.warmup_max_lr": "lr of DummyOptim, with DummyScheduler",
        "scheduler.params.warmup_num_steps": "warmup_num_steps of DummyScheduler, at least 1",
        "scheduler.params.total_num_steps": "total_num_steps of DummyScheduler / ranks",
        "zero_optimization.stage": f"zero_stage {_PLUGIN}",
        "zero_optimization.offload_optimizer.device": f"offload_optimizer_device {_PLUGIN}",
        "zero_optimization.offload_optimizer.nvme_path": f"offload_optimizer_nvme_path {_PLUGIN}",
        "zero_optimization.offload_param.device": f"offload_param_device {_PLUGIN}",
        "zero_optimization.offload_param.nvme_path": f"offload_param_nvme_path {_PLUGIN}",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": f"zero3_save_16bit_model {_PLUGIN}",
        "fp16.enabled": 'mixed_precision is "fp16"',
        "bf16.enabled": 'mixed_precision is "bf16"',
        **_FROM_HIDDEN_SIZE,
    },
    Client.NONE: {},
}
"""Descriptions of the values that each client fills in, by dotted key. The client leaves "auto" at all other keys."""
_MIN_AUTO_KEYS = 3
"""A file with at least this many keys at "auto" is assumed to be written for a client."""


def auto_keys_of(config: Config) -> list[str]:
    """Return all dotted keys at "auto" in alphabetical order, including parameters of optimizer and schedule."""
    found = set(config.auto_keys)
    for name in ("optimizer", "scheduler"):
        section = getattr(config, name)
        if section is not None:
            found |= {f"{name}.params.{key}" for key, value in section.params.items() if value == "auto"}
    return sorted(found)


def guess_client(auto_keys: Collection[str]) -> Client:
    """Guess, from the keys at "auto" in a file, the client for which the file was written.

    Fewer than three keys give `Client.NONE`, unless windlass has no value for one of them, so that a client must fill
    it in.
    """
    needed = any(".params." in key or key in REQUIRED_AUTO_KEYS for key in auto_keys)
    if len(auto_keys) < _MIN_AUTO_KEYS and not needed:
        return Client.NONE
    only = VALUES_BY_CLIENT[Client.ACCELERATE].keys() - VALUES_BY_CLIENT[Client.TRAINER].keys()
    return Client.ACCELERATE if any(key in only for key in auto_keys) else Client.TRAINER


def classify_auto_keys(config: Config, client: Client) -> AutoValues:
    """Classify the keys at "auto" in `config` by what `client` does with them."""
    table = VALUES_BY_CLIENT[client]
    autos = auto_keys_of(config)
    refused = list(_refused_keys(config, autos, client))
    missing = {refusal.path for refusal in refused}
    left = [key for key in autos if key not in table and key not in missing]
    return AutoValues(client, {key: table[key] for key in autos if key in table}, tuple(left), tuple(refused))


def _refused_keys(config: Config, auto_keys: Collection[str], client: Client) -> Iterator[ConfigRefusal]:
    table = VALUES_BY_CLIENT[client]
    if client is Client.ACCELERATE:  # accelerate raises ValueError for every "auto" that it has no value for
        because = "accelerate fails here: it has no value for this key; write one, or delete the key"
        yield from (ConfigRefusal(key, "auto", because) for key in auto_keys if key not in table)
        return
    for refusal in config.refusals():
        if refusal.value != "auto" or refusal.path in table:
            continue
        if client is Client.NONE:
            yield refusal
        else:
            because = f"{CLIENT_NAMES[client]} does not fill it in; write a value or delete the key"
            yield ConfigRefusal(refusal.path, "auto", because)
