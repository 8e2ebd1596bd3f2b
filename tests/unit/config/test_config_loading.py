"""Tests of strict loading: all errors are reported at once, and common spellings are accepted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from windlass.base.errors import ConfigError
from windlass.config import load_config, validate_config
from windlass.config.config_problems import ProblemKind

BROKEN = """{
  "train_micro_batch_size": 4,
  "stage": 2,
  "zero_optimization.reduce_bucket_size": 5,
  "zero_optimization": {
    "stage": 7,
    "reduce_bucket_sise": 1,
    "offload_param": {"device": "disk"}
  },
  "fp16": {"enabled": true},
  "bf16": {"enabled": true, "loss_scale": 1},
  "optimizer": {"type": "AdamW", "params": {"weight_deca": 1, "lr": "fast", "betas": [0.9], "max_grad_norm": 1}},
  "scheduler": {"type": "WarmupDecay", "params": {}}
}"""

EXPECTED = {
    "train_micro_batch_size": (ProblemKind.UNKNOWN, "train_micro_batch_size_per_gpu", 2),
    "stage": (ProblemKind.UNKNOWN, "zero_optimization.stage", 3),
    "zero_optimization.reduce_bucket_size": (ProblemKind.UNKNOWN, "not a path", 4),
    "zero_optimization.stage": (ProblemKind.TYPE, "<= 3", 6),
    "zero_optimization.reduce_bucket_sise": (ProblemKind.UNKNOWN, "zero_optimization.reduce_bucket_size", 7),
    "zero_optimization.offload_param.device": (ProblemKind.TYPE, '"none" or "cpu" or "nvme"', 8),
    "fp16.enabled": (ProblemKind.CONTRADICTION, "fp16 and bf16", 10),
    "bf16.loss_scale": (ProblemKind.UNKNOWN, "fp16.loss_scale", 11),
    "optimizer.params.weight_deca": (ProblemKind.UNKNOWN, "weight_decay", 12),
    "optimizer.params.lr": (ProblemKind.TYPE, "0.001", 12),
    "optimizer.params.betas": (ProblemKind.TYPE, "[0.9, 0.999]", 12),
    "optimizer.params.max_grad_norm": (ProblemKind.UNKNOWN, "gradient_clipping", 12),
    "scheduler.type": (ProblemKind.TYPE, "WarmupDecayLR", 13),
}


def test_all_errors_are_reported_at_once_with_line_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(BROKEN)
    results = {problem.path: problem for problem in validate_config(path).problems}
    assert results.keys() == EXPECTED.keys()
    for key, (kind, words, line) in EXPECTED.items():
        assert (results[key].kind, results[key].line) == (kind, line), key
        assert words in results[key].message, key
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{len(EXPECTED)} problems" in str(caught.value)
    assert all(key in str(caught.value) for key in EXPECTED)


def test_invalid_key_does_not_drop_its_neighbors() -> None:
    config = validate_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}, "nonsense": 1}).config
    assert (config.zero_optimization.stage, config.zero_optimization.reduce_bucket_size) == (2, 500_000_000)


@pytest.mark.parametrize(("written", "meant"), [(5e8, 500_000_000), ("2", 2), (1e6, 1_000_000), (0.94e6, 940_000)])
def test_common_number_spellings_are_integers(written: Any, meant: int) -> None:
    assert (
        load_config({"zero_optimization": {"reduce_bucket_size": written}}).zero_optimization.reduce_bucket_size
        == meant
    )


@pytest.mark.parametrize("written", [980.1, True, "many", None, [1], 0, -5])
def test_invalid_bucket_sizes_are_refused(written: Any) -> None:
    with pytest.raises(ConfigError, match="zero_optimization.reduce_bucket_size"):
        load_config({"zero_optimization": {"reduce_bucket_size": written}})


@pytest.mark.parametrize(
    "bad",
    [
        {"optimizer": {"params": {}}},
        {"optimizer": "Adam"},
        {"optimizer": {"type": "AdamQ"}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}},
        {"scheduler": {"type": "WarmupDecayLR"}},
        {"scheduler": {"type": "StepLR", "params": {"gama": 0.1, "step_size": 2}}},
        {"scheduler": {"type": "StepLR", "params": {"gamma": 0.1}}},
        {"optimizer": {"type": "RMSprop", "params": {"alfa": 0.1}}},
        {"optimizer": {"type": "Lion", "params": {"fused": True}}},
        {"gradient_clipping": -1},
        {"gradient_clipping": math.inf},
        {"steps_per_print": 0},
        {"steps_per_print": "auto"},
        {"communication_data_type": "int8"},
        {"zero_optimization": {"mics_shard_size": 0}},
        {"fp16": {"loss_scale": math.nan}},
        {"fp16": {"loss_scale": True}},
        {"fp16": {"loss_scale_window": 0}},
        {"comm": {"transport": "ucx"}},
    ],
)
def test_wrong_configurations_are_errors(bad: dict[str, Any]) -> None:
    section, value = next(iter(bad.items()))
    keys = [section, *(value if isinstance(value, dict) else ())]
    with pytest.raises(ConfigError, match=r"\.".join(keys[:2] if keys[-1] not in ("type", "params") else keys[:1])):
        load_config(bad)


def test_deprecated_spellings_are_accepted() -> None:
    zero = {
        "prefetch_bucket_size": 1,
        "param_persistence_threshold": 2,
        "stage3_gather_fp16_weights_on_model_save": True,
    }
    config = load_config({"bfloat16": {"enabled": True}, "zero_optimization": zero})
    assert config.bf16.enabled
    assert config.zero_optimization.stage3_prefetch_bucket_size == 1
    assert config.zero_optimization.stage3_param_persistence_threshold == 2
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save


def test_two_spellings_of_one_key_are_an_error() -> None:
    with pytest.raises(ConfigError, match='"bfloat16" and "bf16" are two spellings'):
        load_config({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}})
    with pytest.raises(ConfigError, match='"bf16" and "bfloat16" are two spellings'):
        load_config({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}})
    with pytest.raises(ConfigError, match="two spellings"):
        load_config({"zero_optimization": {"stage3_prefetch_bucket_size": "auto", "prefetch_bucket_size": 1}})


def test_boolean_zero_is_stage_one_and_reads_the_old_bucket_size() -> None:
    config = load_config({"zero_optimization": True, "allgather_size": 1e6})
    assert (config.zero_optimization.stage, config.zero_optimization.allgather_bucket_size) == (1, 1_000_000)
    assert load_config({"zero_optimization": False}).zero_optimization.stage == 0


@pytest.mark.parametrize(("written", "meant"), [(True, 1.0), (False, 0.0), ("auto", 1.0), (0.5, 0.5)])
def test_a_boolean_clips_at_one_or_not_at_all(written: Any, meant: float) -> None:
    """A boolean is accepted as in DeepSpeed. Ray Train's DeepSpeed example uses `true`."""
    assert load_config({"gradient_clipping": written}).gradient_clipping == meant


def test_auto_is_the_default_in_sections_and_unfilled_elsewhere() -> None:
    config = load_config(
        {
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
            "fp16": {"enabled": "auto"},
            "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        }
    )
    assert (config.gradient_clipping, config.fp16.enabled) == (1.0, False)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert {refusal.path for refusal in config.refusals()} == {
        "fp16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "scheduler.params.warmup_num_steps",
    }


def test_steps_per_print_may_be_infinite() -> None:
    assert load_config({"steps_per_print": math.inf}).steps_per_print == math.inf


def test_dtypes_are_read_in_every_spelling() -> None:
    from windlass.base import dtypes
    from windlass.config.config_section import _DTYPES

    assert set(_DTYPES) == set(dtypes.FLOAT_DTYPES)
    for name in _DTYPES:
        for spelled in (name, name.upper(), f"torch.{name}"):
            read = load_config({"communication_data_type": spelled}).communication_data_type
            assert read is not None and dtypes.parse_dtype(read) is dtypes.parse_dtype(spelled)


def test_configuration_is_immutable() -> None:
    config = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.zero_optimization.stage = 3


def test_reading_needs_no_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, windlass.config as c\n"
        "c.load_config({'optimizer': {'type': 'AdamW', 'params': {'lr': 1}}, "
        "'scheduler': {'type': 'WarmupLR'}}).refusals()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("section", ["zero_optimization", "optimizer"])
def test_every_listed_unknown_key_has_its_hint(section: str) -> None:
    keys: dict[str, Any] = {f"unlike_any_{number}": number for number in range(90)}
    if section == "optimizer":
        data: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {**keys, "weight_deca": 0.1}}}
    else:
        data = {**dict.fromkeys(("fp16", "bf16"), 3), "zero_optimization": {**keys, "reduce_bucket_sise": 1}}
    with pytest.raises(ConfigError, match=r"nearest is (weight_decay|.*reduce_bucket_size)"):
        load_config(data)
