"""Tests that `initialize` accepts every configuration that `windlass check` accepts, and the reverse."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import windlass
from windlass.base.errors import WindlassError
from windlass.cli.check import check
from windlass.compress.compression_training import init_compression
from windlass.config import optimizer_section, scheduler_section
from windlass.config.key_table import TRAINING_CONFIG, config_keys
from windlass.optim import mup, optimizer_factory, scheduler_factory

app = typer.Typer()
app.command()(check)
EXAMPLES = int(os.environ.get("WINDLASS_FUZZ_EXAMPLES", "80"))
COMMON = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="WINDLASS_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

numbers = st.sampled_from(
    [0, 1, 2, -1, 0.5, 0.95, 1.0, 1e-3, -0.0, 1e3, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 10**400]
)
odd = st.one_of(
    numbers,
    st.sampled_from([None, True, False, "auto", "", "0.1", "log", "original", [], {}, ["", 0.95], [0.9, True]]),
    st.lists(numbers, min_size=1, max_size=3),
)


@pytest.fixture(autouse=True, scope="module")
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("agreement"))  # monitors write to configured paths, which may be relative
    yield
    os.chdir(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def says_check(config: dict[str, Any]) -> tuple[bool, str]:
    Path("ds.json").write_text(json.dumps(config))
    result = CliRunner().invoke(app, ["ds.json", "--client", "none", "--world-size", "1"], catch_exceptions=False)
    return result.exit_code == 0, result.output


def says_initialize(config: dict[str, Any], model: torch.nn.Module | None = None) -> tuple[bool, str]:
    model = model or torch.nn.Linear(4, 4)
    try:
        if "compression_training" in config:
            init_compression(model, config)
        engine, *_ = windlass.initialize(model=model, config=config)
    except WindlassError as error:
        return False, str(error)
    engine.destroy()
    return True, ""


def assert_agreement(config: dict[str, Any], model: torch.nn.Module | None = None) -> None:
    checked, printed = says_check(config)
    built, reason = says_initialize(config, model)
    assert checked == built, f"{config}\ncheck: {checked}\n{printed}\ninitialize: {built}\n{reason}"


FOREIGN = ["lr", "betas", "eps", "T_max", "step_size", "gamma", "max_lr", "momentum", "alpha", "weight_decay"]


def sections(kinds: list[str], tables: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    def of(kind: str) -> st.SearchStrategy[dict[str, Any]]:
        names = list(tables.get(kind, {})) or FOREIGN
        usual = {name: st.just(tables[kind][name].default) for name in names} if kind in tables else {}
        values = {name: st.one_of(odd, usual[name]) if name in usual else odd for name in names}
        values = {name: value.filter(lambda one: one is not ...) for name, value in values.items()}
        params = st.lists(st.sampled_from(names), max_size=3, unique=True).flatmap(
            lambda chosen: st.fixed_dictionaries({name: values[name] for name in chosen})
        )
        needed = [name for name, item in tables.get(kind, {}).items() if item.default is ...]
        filled = params.map(lambda found: {**dict.fromkeys(needed, 10), **found})
        return st.fixed_dictionaries({"type": st.sampled_from([kind, kind.lower()]), "params": filled})

    return st.sampled_from(kinds).flatmap(of)


# A muP optimizer needs a model with base shapes: the model of this test has none, and `check` has no model.
_NAMES = [
    name
    for name in (*optimizer_section.OPTIMIZER_PARAMETERS, *optimizer_factory.list_optimizer_names())
    if name.lower() not in mup.STEP_CLASSES
]
optimizers = sections([*_NAMES, "LBFGS", "nothing"], optimizer_section.OPTIMIZER_PARAMETERS)
schedulers = sections(
    [*scheduler_section.SCHEDULER_PARAMETERS, *scheduler_factory.list_scheduler_names(), "LambdaLR", "nothing"],
    scheduler_section.SCHEDULER_PARAMETERS,
)
BASE = {"train_batch_size": 2}


@COMMON
@given(optimizers, st.one_of(st.none(), schedulers))
@example({"type": "AdamW", "params": {"betas": ["", 0.95]}}, None)
@example({"type": "AdamW", "params": {"lr": -1}}, None)
@example({"type": "AdamW", "params": {"betas": [0.9, 1.0]}}, None)
@example({"type": "NAdam", "params": {"betas": ["", 0.95]}}, None)
@example({"type": "SGD", "params": {"nesterov": True}}, None)
@example({"type": "AdamW", "params": {"fused": True, "foreach": True}}, None)
@example({"type": "AdamW", "params": {}}, {"type": "CosineAnnealingLR", "params": {"T_max": 0}})
@example({"type": "AdamW", "params": {}}, {"type": "WarmupLR", "params": {"warmup_num_steps": 0}})
@example({"type": "Lion", "params": {}}, {"type": "CyclicLR", "params": {"base_lr": 0.1, "max_lr": 1}})
def test_optimizer_and_schedule(optimizer: dict[str, Any], scheduler: dict[str, Any] | None) -> None:
    assert_agreement({**BASE, "optimizer": optimizer} | ({"scheduler": scheduler} if scheduler else {}))


OF_THE_MODEL = {f"parallel.{name}" for name in ("expert_bias_update_rate", "tiled_mlp", "tiled_loss", "recompute")}
"""Keys that only `initialize` refuses, because the refusal depends on the model. Below: prefixes of such keys."""
OF_THE_MODEL_SECTIONS = ("distillation.", "quantize_training.", "compression_training.layer_reduction.")
KEYS = {
    row.path: row.type
    for row in config_keys()
    if row.root == TRAINING_CONFIG
    and not row.owner
    and not any(mark in row.path for mark in '<["')
    and row.type != "section"
    and row.path not in OF_THE_MODEL
    and not row.path.startswith(OF_THE_MODEL_SECTIONS)
}


def plausible(words: str) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a key. `words` is the key's type as described to users, e.g. "whole number"."""
    results: list[Any] = [json.loads(item) for item in words.split(" or ") if item.startswith('"')]
    results += [True, False] if "true or false" in words else []
    results += [1, 2, 3, 0, 10**6, 10**18] if "whole number" in words else []
    results += [1, 0.5, 0, 1e-3, 1e9] if "number" in words else []
    results += ["some", "*", "/proc/none", "some/folder"] if "string" in words else []
    results += [["some"], []] if "list" in words else []
    results += [{}, {"some": 1}] if "object" in words else []
    return st.sampled_from(results) if results else odd


def nested(values: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(BASE))
    for path, value in values.items():
        *outer, name = path.split(".")
        section = config
        for step in outer:
            result = section.setdefault(step, {})
            section = result if isinstance(result, dict) else section.setdefault(step + "_", {})
        section[name] = value
    return config


some_keys = st.lists(st.sampled_from(list(KEYS)), min_size=1, max_size=3, unique=True).flatmap(
    lambda chosen: st.fixed_dictionaries({path: st.one_of(plausible(KEYS[path]), odd) for path in chosen})
)
sharding = st.fixed_dictionaries(
    {},
    optional={
        "zero_optimization.stage": st.integers(0, 3),
        "zero_optimization.offload_optimizer.device": st.sampled_from(["cpu", "nvme", "none"]),
        "zero_optimization.offload_optimizer.nvme_path": st.just("nvme"),
        "zero_optimization.offload_param.device": st.sampled_from(["cpu", "nvme", "none"]),
        "zero_optimization.offload_param.nvme_path": st.just("nvme"),
        "bf16.enabled": st.booleans(),
        "optimizer": st.sampled_from([{"type": "AdamW", "params": {"lr": 0.1}}, {"type": "SGD"}, {"type": "Muon"}]),
        "scheduler": st.just({"type": "WarmupLR", "params": {"warmup_num_steps": 5}}),
    },
)


@COMMON
@given(sharding, some_keys)
def test_any_key(common: dict[str, Any], values: dict[str, Any]) -> None:
    assert_agreement(nested({**common, **values}))


def group(**params: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    modules = st.lists(st.sampled_from(["*", "0", "^0$", "(", 3]), max_size=2, unique_by=str)
    return st.fixed_dictionaries(
        {}, optional={"params": st.fixed_dictionaries({}, optional=params), "modules": modules}
    )


def technique(
    shared: dict[str, st.SearchStrategy[Any]], **params: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    groups = st.sampled_from([{}, None]).flatmap(
        lambda one: st.just(one) if one is not None else st.fixed_dictionaries({"g": group(**params)})
    )
    common = st.fixed_dictionaries({"enabled": st.sampled_from([True, True, False, "yes"])}, optional=shared)
    return st.fixed_dictionaries({"shared_parameters": common}, optional={"different_groups": groups})


bits = st.sampled_from([1, 2, 4, 8, 16, 17, 0, None, "4"])
shares = st.sampled_from([0.5, 1, 1.5, 0, -1, None, "some"])
pruned = {"method": st.sampled_from(["l1", "topk", "snip_momentum", "movement"])}
blocks = {
    "block_pattern": st.sampled_from(["4x1", "1x1", "x4", "0x1", "4", "4x1x1"]),
    "excluded_modules": st.sampled_from([[], ["none"], ["("]]),
    "dense_ratio": shares,
}
techniques = st.fixed_dictionaries(
    {},
    optional={
        "weight_quantization": technique(
            {
                "quantize_groups": st.sampled_from([1, 4, 0]),
                "rounding": st.sampled_from(["nearest", "stochastic", "up"]),
            },
            start_bits=bits,
            target_bits=bits,
            weight_format=st.sampled_from(["int2_g64", None]),
        ),
        "activation_quantization": technique({"range_calibration": st.sampled_from(["static", "some"])}, bits=bits),
        "sparse_pruning": technique({**pruned, **blocks}, dense_ratio=shares),
        "row_pruning": technique(pruned, dense_ratio=shares),
        "head_pruning": technique({**pruned, "num_heads": st.sampled_from([1, 4, None, 0])}, dense_ratio=shares),
    },
)
packed = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.sampled_from([4, 8, 2, 5, None]),
        "group_size": st.sampled_from([16, 32, 64, 128, 0]),
        "group_dim": st.sampled_from([0, 1, 2]),
        "symmetric": st.booleans(),
    },
)
packing = st.fixed_dictionaries(
    {}, optional={"enabled": st.booleans(), "quantized_initialization": packed, "post_init_quant": st.just({})}
) | st.fixed_dictionaries({"post_init_quant": st.fixed_dictionaries({"0": packed})})


@COMMON
@given(techniques)
@example({"sparse_pruning": {"shared_parameters": {"enabled": True}}})
@example({"row_pruning": {"shared_parameters": {"enabled": True}, "different_groups": {"g": {"modules": ["("]}}}})
def test_compression_training(section: dict[str, Any]) -> None:
    assert_agreement({**BASE, "compression_training": section}, torch.nn.Sequential(torch.nn.Linear(8, 8)))


@COMMON
@given(packing, st.sampled_from([{}, {"tensor_parallel": {"autotp_size": 1}}]))
@example({"post_init_quant": {"0": {"symmetric": True, "num_bits": 4, "group_size": 16}}}, {})
def test_weight_quantization(section: dict[str, Any], more: dict[str, Any]) -> None:
    assert_agreement({**BASE, "weight_quantization": section, **more}, torch.nn.Sequential(torch.nn.Linear(128, 128)))
