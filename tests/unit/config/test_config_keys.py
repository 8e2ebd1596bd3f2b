"""Tests that every DeepSpeed key has a status, and that loading behaves accordingly."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from windlass.base.errors import ConfigError
from windlass.config import load_config
from windlass.config.config_loading import validate_config
from windlass.config.config_section import ConfigSection
from windlass.config.key_status import KeyStatus
from windlass.config.key_table import TRAINING_CONFIG, ConfigKey, config_keys, find_key

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "tests" / "data" / "ds_config_key_paths.txt"
FACTS = ROOT.parent / "shared" / "compat" / "ds_config_keys.json"
ROOTS = {
    "init_inference(config=, **kwargs)": "init_inference",
    "deepspeed.inference.RaggedInferenceEngineConfig": "RaggedInferenceEngineConfig",
}
LITERAL = " (as a literal dotted TOP-LEVEL key)"


class Key(NamedTuple):
    root: str
    path: str
    owner: str


def committed() -> list[Key]:
    return [Key(*line.split("\t")) for line in COMMITTED.read_text("utf-8").splitlines()]


def row_of(key: Key) -> ConfigKey | None:
    path = f'"{key.path.removesuffix(LITERAL)}"' if key.path.endswith(LITERAL) else key.path
    return find_key(key.root, path, key.owner)


def test_every_key_has_a_status_and_a_reason() -> None:
    keys = committed()
    assert len(set(keys)) == len(keys) == 613
    for key in keys:
        row = row_of(key)
        assert row is not None, key
        assert row.reason or row.status is KeyStatus.HONOURED, key


DICTS = (
    "quantize_training.",
    "zero_optimization.zeropp_loco_param.",
    "weight_quantization.",
    "quant.weight.",
)


def test_every_row_is_a_key_or_has_a_reason() -> None:
    """Each row that DeepSpeed's list of keys lacks has a reason.

    The row is windlass's own, a parameter of one optimizer or schedule, a section, or an `enabled` switch. Or
    DeepSpeed's list has the key once for all compression techniques, or lists only the dict that contains it.
    """
    known = {row_of(key) for key in committed()}
    for row in set(config_keys()) - known:
        holds_keys = any(other.root == row.root and other.path.startswith(f"{row.path}.") for other in config_keys())
        own_switch = row.path.endswith(".enabled")
        # DeepSpeed's list has such a key once for all techniques, or only the dict that contains it.
        shared_group = "different_groups" in row.path or row.path.startswith(DICTS)
        assert row.windlass_only or row.owner or holds_keys or own_switch or shared_group or row.path == "amp.<key>", (
            row
        )


def test_honored_keys_are_described() -> None:
    for row in config_keys():
        if not row.owner and row.status is KeyStatus.HONOURED:
            assert row.reason.endswith((".", ")")), row.path


@pytest.mark.skipif(not FACTS.is_file(), reason="DeepSpeed's list of keys is not beside the project")
def test_recorded_paths_and_aliases_equal_deepspeed() -> None:
    facts = json.loads(FACTS.read_text("utf-8"))["keys"]
    keys = [
        Key(ROOTS.get(fact.get("root"), TRAINING_CONFIG), fact["path"], fact.get("applies_to") or "") for fact in facts
    ]
    assert keys == committed()
    for key, fact in zip(keys, facts, strict=True):
        for alias in fact.get("aliases", ()):
            spelled = ".".join([*key.path.split(".")[:-1], alias])
            assert find_key(key.root, spelled) == row_of(key), (key, alias)


@pytest.mark.skipif(not FACTS.is_file(), reason="DeepSpeed's list of keys is not beside the project")
def test_plain_defaults_equal_deepspeed() -> None:
    """A default of DeepSpeed that is a plain value is the default here too, so that an omitted key means the same."""
    differing = {
        # DeepSpeed's default is a string, windlass's a list of this one string
        "compression_training.<technique>.different_groups.<g>.modules",
        "aio.queue_depth",  # affects speed only: at a depth of 8, reads have three quarters of the rate
    }
    for fact in json.loads(FACTS.read_text("utf-8"))["keys"]:
        default = fact["default"]
        plain = isinstance(default, bool | int | float | str) and not str(default).startswith("<")
        if not plain or fact.get("root") or fact.get("applies_to") or fact["path"] in differing:
            continue
        row = find_key(TRAINING_CONFIG, fact["path"])
        assert row is not None
        if row.default != "section" and not fact["type"].startswith("dict"):
            assert json.loads(row.default) == default, fact["path"]


def at(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: at(rest, value) if rest else value}


def refused_fields() -> list[ConfigKey]:
    return [
        row
        for row in config_keys()
        if row.root == TRAINING_CONFIG and row.status is KeyStatus.REFUSED and not row.owner
    ]


def test_unsupported_switch_is_refused_by_name_if_on() -> None:
    switches = [row.path for row in refused_fields() if row.path.endswith(".enabled") and row.path.count(".") == 1]
    assert len(switches) > 5
    for path in switches:
        assert [refusal.path for refusal in load_config(at(path, True)).refusals()] == [path]
        assert load_config(at(path, False)).refusals() == []


def test_disabled_section_is_not_checked() -> None:
    checked = 0
    for row in refused_fields():
        section, _, key = row.path.partition(".")
        other = {"true or false": True, "string": "x"}.get(row.type)
        # `compile.enabled` is a switch of torch.compile alone
        if "." in key or not key or other is None or key == "enabled" or section == "compile":
            continue
        if find_key(TRAINING_CONFIG, f"{section}.enabled"):
            assert not any(
                r.path.startswith(section) for r in load_config({section: {"enabled": False, key: other}}).refusals()
            )
            checked += 1
    assert checked


ASKS: list[tuple[str, Any]] = [
    ("zero_optimization.zenflow", {"topk_ratio": 0.2}),
    ("zero_optimization.legacy_stage1", True),
    ("tensor_parallel.kernel_inject", True),
    ("tensor_parallel.injection_policy_tuple", ["x"]),
    ("tensor_parallel.tp.tp_group", "x"),
    ("use_data_before_expert_parallelism", True),
    ("compile.deepcompile", True),
    ("compile.passes", ["z3"]),
    ("sparse_attention.mode", "fixed"),
    ("inference.tensor_parallel", {"tp_size": 2}),
    ("aio.use_gds", True),
    ("bf16.check_overflow", True),
    ("graph_harvesting", True),
    ("datastates_ckpt", {}),
]


@pytest.mark.parametrize(("path", "value"), ASKS)
def test_unsupported_features_are_refused_by_name(path: str, value: Any) -> None:
    source = at(path, value)
    if path.split(".")[0] in ("fp16", "bf16", "torch_autocast"):
        source[path.split(".")[0]]["enabled"] = True
    refusals = load_config(source).refusals()
    assert [refusal.path for refusal in refusals] == [path]
    assert refusals[0].reason and str(refusals[0]).startswith(f"{path} = ")


def test_refused_key_in_a_list_of_sections_is_named_with_its_index() -> None:
    specs = [{"patterns": "a"}, {"patterns": ["b"], "gather_output": True}]
    refusals = load_config({"tensor_parallel": {"partition_config": {"layer_specs": specs}}}).refusals()
    assert [item.path for item in refusals] == ["tensor_parallel.partition_config.layer_specs[1].gather_output"]


def test_expert_keys_are_refused_only_if_enabled() -> None:
    requested = {"enabled": True, "autoep_size": 2, "use_grouped_mm": False, "comm_backend": "deepep", "top_k": 2}
    refusals = load_config({"expert_parallel": requested}).refusals()
    assert {item.path for item in refusals} == {"expert_parallel.comm_backend", "expert_parallel.top_k"}
    assert load_config({"expert_parallel": {**requested, "enabled": False}}).refusals() == []


def test_empty_sections_are_accepted() -> None:
    assert load_config({}).refusals() == []
    from windlass.config import Config

    for name, field in Config.model_fields.items():
        value = field.get_default(call_default_factory=True)
        if isinstance(value, ConfigSection):
            assert load_config({name: {}}).refusals() == [], name
    off = {"device": "none", "pin_memory": False, "nvme_path": "/somewhere", "buffer_count": 9}
    assert load_config({"zero_optimization": {"offload_param": off, "offload_optimizer": off}}).refusals() == []
    assert load_config({"sparse_attention": {"mode": "dense"}, "inference": {}}).refusals() == []
    assert load_config({"elasticity": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}}).refusals() == []


def test_passed_on_keys_load_under_sections_with_free_keys() -> None:
    assert load_config({"amp": {"enabled": False, "opt_level": "O1"}}).refusals() == []
    assert [item.path for item in load_config({"amp": {"enabled": True, "opt_level": "O1"}}).refusals()] == [
        "amp.enabled"
    ]


def test_refusals_are_raised_as_one_error() -> None:
    load_config({}).ensure_supported()
    with pytest.raises(ConfigError) as caught:
        load_config({"nebula": {"enabled": True}, "graph_harvesting": True}).ensure_supported()
    assert "nebula.enabled" in str(caught.value) and "graph_harvesting" in str(caught.value)


def test_deprecated_offload_keys_are_aliases() -> None:
    old = load_config(
        {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}
    ).zero_optimization
    assert old.offload_optimizer is not None and old.offload_optimizer.device == "cpu"
    assert old.offload_param is not None and old.offload_param.device == "cpu"
    off = load_config({"zero_optimization": {"stage": 1, "cpu_offload": False}}).zero_optimization
    assert off.offload_optimizer is None
    with pytest.raises(ConfigError, match="older spelling"):
        load_config({"zero_optimization": {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}})


@pytest.mark.parametrize("given", [True, "true", 1])
@pytest.mark.parametrize("beside", [{}, {"offload_optimizer": "auto"}, {"offload_optimizer": None}])
def test_cpu_offload_takes_effect_in_every_accepted_form(given: object, beside: dict[str, object]) -> None:
    zero = load_config({"zero_optimization": {"stage": 1, "cpu_offload": given, **beside}}).zero_optimization
    assert zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"


def test_a_cpu_offload_that_is_no_boolean_is_reported() -> None:
    with pytest.raises(ConfigError, match="cpu_offload"):
        load_config({"zero_optimization": {"stage": 1, "cpu_offload": "perhaps"}})


@pytest.mark.parametrize("section", [{"params": {}}, {"type": None}])
def test_a_missing_key_is_reported_once_beside_other_problems(section: dict[str, object]) -> None:
    found = validate_config({"optimizer": section, "zero_optimization": {"stage": 9}}).problems
    assert sorted(problem.path for problem in found) == ["optimizer.type", "zero_optimization.stage"]


def test_comments_in_tables() -> None:
    groups = {"_comment": "x", "wq1": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["a"]}}
    quantization = {"shared_parameters": {"enabled": True, "schedule_offset": 0}, "different_groups": groups}
    table = {r"_orig_mod\..*q_proj": "column", "_comment": "x"}
    config = load_config(
        {"compression_training": {"weight_quantization": quantization}, "parallel": {"tensor_table": table}}
    )
    assert config.parallel.tensor_table == {r"_orig_mod\..*q_proj": "column"}
    assert len(config.comments) == 2
    formats = {"_orig_mod": {"num_bits": 8}, "_comment": "x"}
    pairs = {"_orig_mod.norm": "norm", "_comment": "x"}
    config = load_config({"weight_quantization": {"post_init_quant": formats}, "distillation": {"layers": pairs}})
    assert list(config.weight_quantization.post_init_quant) == ["_orig_mod"]
    assert config.distillation.layers == {"_orig_mod.norm": "norm"}
    assert len(config.comments) == 2


def test_values_that_are_not_plain() -> None:
    lock = threading.Lock()
    config = load_config(
        {
            "optimizer": {"type": "Adam", "params": {"betas": np.array([0.5, 0.75]), "lr": np.float32(0.5)}},
            "tensor_parallel": {"tp": {"tp_group": lock}},
        }
    )
    assert config.optimizer is not None and config.optimizer.params == {"betas": [0.5, 0.75], "lr": 0.5}
    assert any("tp_group" in refusal.path for refusal in config.refusals())
    config = load_config({"optimizer": {"type": "Adam", "params": {"betas": (np.float32(0.5), np.float64(0.75))}}})
    assert config.optimizer is not None and config.optimizer.params == {"betas": (0.5, 0.75)}
