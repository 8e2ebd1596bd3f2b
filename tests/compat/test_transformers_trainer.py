"""Tests that transformers' Trainer under a DeepSpeed configuration trains as the plain Trainer, at every stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.compat.client_configs import config as _config
from tests.compat.conftest import require_package, start

require_package("accelerate")

_SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}
_HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def _own_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "optimizer"}


_ALL = {"resume": True, "evaluate": True, "save": True, "generate": True}
_CASES: dict[str, dict[str, Any]] = {
    **{f"stage-{stage}": {"config": _config(stage), **_ALL} for stage in range(4)},
    "host": {"config": _config(3, _HOST), "resume": True},
    "accumulated": {"config": _config(2), "accumulation": 2},
    "accumulated-3": {"config": _config(3), "accumulation": 2},
    "trainers-optimizer": {"config": _own_optimizer(_config(3, _HOST))},
    "bf16": {"config": _config(3), "dtype": "bf16"},
    "schedule": {"config": _config(2, scheduler=_SCHEDULE)},
    "resized-2": {"config": _config(2), "resize": 56, "save": True},
    "resized-3": {"config": _config(3), "resize": 56, "save": True},
}
_WHOLE = {"stage3_gather_16bit_weights_on_model_save": True}
_AXES: dict[str, dict[str, Any]] = {
    **{
        f"tensor-{stage}": {
            "config": _config(stage, _WHOLE, tensor_parallel={"autotp_size": 2}),
            "readers": 1,
            "save": True,
            "resume": True,
        }
        for stage in (0, 2)  # at other stages transformers itself refuses to load a model
    },
    **{
        f"sequence-{stage}": {"config": _config(stage), "readers": 1, "sequences": 2, "save": True}
        for stage in (1, 3)
        if int(version("transformers").partition(".")[0]) >= 5  # older Trainers do not shard sequences
    },
}
Told = dict[str, dict[str, Any]]
_RANKS = [pytest.param(1, marks=pytest.mark.slow), 2]  # `test_accelerate` trains on one rank too


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Told]:
    """Return the results of all cases: on 0 ranks the plain Trainer, on 1 and 2 under DeepSpeed configurations."""
    from transformers import LlamaForCausalLM

    from tests.compat.scripts import transformers_training

    out = tmp_path_factory.mktemp("trainer")
    torch.manual_seed(0)
    LlamaForCausalLM(transformers_training.model_config()).save_pretrained(out / "start")
    results: dict[int, Told] = {}

    def get(ranks: int) -> Told:
        if ranks not in results:
            results[ranks] = {}  # a failing run is not repeated
            requested = {**_CASES, **_AXES} if ranks == 2 else _CASES
            cases = [{"name": name, "ranks": ranks, **case} for name, case in requested.items()]
            if ranks == 0:
                cases = [{"name": "plain", **_ALL}, {"name": "resized", "resize": 56, "save": True}]
            (out / f"cases-{ranks}.json").write_text(json.dumps(cases))
            start("transformers_training.py", out, out / f"cases-{ranks}.json", ranks=ranks, stands_in=ranks > 0)
            results[ranks] = json.loads((out / f"results-{max(ranks, 1)}{'' if ranks else '-plain'}.json").read_text())
            for name, item in results[ranks].items():
                item["folder"] = out / f"{name}-{ranks}"
        return results[ranks]

    return get


@pytest.mark.parametrize("ranks", _RANKS)
@pytest.mark.parametrize("name", [name for name in _CASES if name != "bf16" and name != "schedule"])
def test_losses_equal_the_plain_trainer(results_of: Callable[[int], Told], name: str, ranks: int) -> None:
    """Losses (also after a resume in a new Trainer), norms, evaluation and generation equal the plain Trainer's."""
    plain, item = results_of(0)["resized" if _CASES[name].get("resize") else "plain"], results_of(ranks)[name]
    assert item["losses"] == pytest.approx(plain["losses"], abs=2e-6)
    assert item["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    if _CASES[name].get("resume"):
        assert item["resumed"] == pytest.approx(dict(zip("34", plain["losses"][2:], strict=True)), abs=2e-6)
    if _CASES[name].get("evaluate"):
        assert item["eval_loss"] == pytest.approx(plain["eval_loss"], abs=2e-6)
    if _CASES[name].get("generate"):
        assert item["generated"] == plain["generated"]


@pytest.mark.parametrize("name", _AXES)
def test_models_and_sequences_sharded_over_ranks_train_as_one(results_of: Callable[[int], Told], name: str) -> None:
    """Losses and norms with tensor and with sequence parallelism on two ranks equal the plain Trainer's."""
    plain, item = results_of(0)["plain"], results_of(2)[name]
    assert item["losses"] == pytest.approx(plain["losses"], abs=2e-6)
    assert item["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    if _AXES[name].get("resume"):
        assert item["resumed"] == pytest.approx(dict(zip("34", plain["losses"][2:], strict=True)), abs=2e-6)


@pytest.mark.parametrize("ranks", _RANKS)
def test_bf16_losses_are_close_to_fp32(results_of: Callable[[int], Told], ranks: int) -> None:
    """bf16 with fp32 masters follows the fp32 losses within the precision of bf16 logits."""
    assert results_of(ranks)["bf16"]["losses"] == pytest.approx(results_of(0)["plain"]["losses"], rel=2e-3)


@pytest.mark.parametrize("ranks", _RANKS)
def test_schedule_of_the_configuration_equals_deepspeed(results_of: Callable[[int], Told], ranks: int) -> None:
    """DeepSpeed's warm-up gives the second update the lowest rate too, so the third loss differs from the plain one."""
    plain, item = results_of(0)["plain"], results_of(ranks)["schedule"]
    assert item["losses"][:2] == pytest.approx(plain["losses"][:2], abs=2e-6)
    assert item["rates"] == pytest.approx([0.0, 2.5e-3, 5e-3, 2.5e-3])
    assert abs(item["losses"][2] - plain["losses"][2]) > 1e-3


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name, case in _CASES.items() if case.get("save")),
        *((name, 2) for name, case in _CASES.items() if case.get("save")),
        *((name, 2) for name, case in _AXES.items() if case.get("save")),
    ],
)
def test_saved_models_are_complete_and_equal(results_of: Callable[[int], Told], name: str, ranks: int) -> None:
    """`save_model` writes weights equal to the plain Trainer's; checkpoints have DeepSpeed's folder and `latest`."""
    case = {**_CASES, **_AXES}[name]
    plain, item = results_of(0)["resized" if case.get("resize") else "plain"], results_of(ranks)[name]
    expected, actual = (load_file(of["folder"] / "saved" / "model.safetensors") for of in (plain, item))
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, atol=5e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
    if case.get("resume"):
        assert (item["folder"] / "checkpoint-2" / "global_step2").is_dir()
        assert (item["folder"] / "checkpoint-2" / "latest").read_text() == "global_step2"
