"""Tests of 4-bit models with adapters of peft: sharded while they are loaded, trained as in one process."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.causal_models import build as build_causal
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import build
from windlass.base.errors import ConfigError, ModelError
from windlass.compress.lora import add_adapters
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.packed_model import load_packed_model
from windlass.compress.rounded_model import load_rounded_model
from windlass.kernels.packed_linear import PackedLinear
from windlass.parallel.placement import get_placement
from windlass.zero.sharded_init import initial_shard

if importlib.util.find_spec("peft") is None:  # an import would take seconds in each process that collects tests
    pytest.skip("peft is not installed", allow_module_level=True)

FORMAT, STEPS, ROWS, RATE = "int4_g32", 3, 4, 0.01
LONG, LOW = 50, 0.001  # steps; rate at which rounding errors do not grow over these steps
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two directories: the unquantized model (`wide`), and the same model packed."""
    path = tmp_path_factory.mktemp("models")
    model = build("llama", tied=False)
    model.save_pretrained(path / "wide")
    write_packed_directory(path / "wide", path / "packed", FORMAT)
    return path


def adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of transformers about peft
        made = add_adapters(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    torch.manual_seed(4)
    for name, parameter in made.named_parameters():  # else the adapters begin at zero
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made


def ids(step: int) -> Tensor:
    return torch.randint(30, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def trained(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in state.items() if "lora_" in name}


def plain(folder: Path, steps: int = STEPS, rate: float = RATE) -> tuple[list[float], dict[str, Tensor]]:
    """Train adapters in plain PyTorch, on linear layers with the unpacked values of the packed weights."""
    from peft import LoraConfig, get_peft_model

    packed = load_packed_model(folder / "packed")
    for name, module in list(packed.named_modules()):
        if isinstance(module, PackedLinear):
            packed.set_submodule(name, module.to_linear(torch.float32))
    head = packed.get_output_embeddings()
    names = {name for name, module in packed.named_modules() if type(module) is nn.Linear and module is not head}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        model = get_peft_model(packed, LoraConfig(r=4, lora_alpha=8, target_modules=names))
    state = trained(adapted(load_packed_model(folder / "packed")).state_dict())
    assert model.load_state_dict(state, strict=False).unexpected_keys == []
    parameters, losses = [p for p in model.parameters() if p.requires_grad], []
    assert len(parameters) == len(state)
    optimizer = torch.optim.AdamW(parameters, lr=rate, eps=1e-4, weight_decay=0.0)
    for step in range(steps):
        loss = model(input_ids=ids(step), labels=ids(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, trained(model.state_dict())


def base_config(zero: dict[str, Any], rate: float = RATE) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "eps": 1e-4, "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }


def held_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of packed weights that this rank holds before `initialize`, and those of the full weights."""
    held = whole = 0
    for parameter in model.parameters():
        if parameter.dtype == torch.uint8:
            shard = initial_shard.find(parameter)
            held += parameter.numel() if shard is None else shard.shard.numel()
            whole += parameter.numel()
    return held, whole


def train(
    source: str,
    weights: str | None,
    zero: dict[str, Any],
    parallel: dict[str, int] | None = None,
    steps: int = STEPS,
    rate: float = RATE,
) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    config = {**base_config(zero, rate), "parallel": parallel or {}}
    readers = 1 if parallel else dist.get_world_size()
    model = windlass.from_pretrained(AutoModelForCausalLM, source, config=config, weights=weights)
    loaded = held_bytes(model)
    engine = windlass.initialize(model=adapted(model), config=config)[0]
    units = [unit for unit in engine._sharded.units if unit.dtype == torch.uint8]
    losses = []
    for step in range(steps):
        rows = ids(step).chunk(readers)[dist.get_rank() % readers]
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    held = sum(u.shard_slot.numel if u.shard_slot is not None else u.local_shard.numel() for u in units)
    padding = sum(unit.layout.padded - unit.layout.numel for unit in units)
    state = engine.full_state_dict()
    engine.destroy()
    return {
        "losses": losses,
        "state": trained(state) if dist.get_rank() == 0 else {},
        "loaded": loaded,
        "held": held,
        "padding": padding,
    }


@pytest.mark.parametrize(
    ("source", "weights", "zero", "transport", "steps"),
    [
        ("packed", None, {"stage": 3}, "shm", STEPS),
        ("packed", None, {"stage": 3, **OFFLOADED}, "gloo", STEPS),
        ("wide", FORMAT, {"stage": 3}, "gloo", STEPS),
        pytest.param("packed", None, {"stage": 3}, "shm", LONG, marks=pytest.mark.slow),
        pytest.param("packed", None, {"stage": 3, **OFFLOADED}, "gloo", LONG, marks=pytest.mark.slow),
        pytest.param("wide", FORMAT, {"stage": 3}, "gloo", LONG, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_4_bit_base_trains_its_adapters_as_in_one_process(
    source: str, weights: str | None, zero: dict[str, Any], transport: str, steps: int, folder: Path
) -> None:
    rate = LOW if steps == LONG else RATE
    losses, state = plain(folder, steps, rate)
    results = run_ranks(train, 2, str(folder / source), weights, zero, None, steps, rate, transport=transport)
    assert results[0]["losses"] == pytest.approx(losses, rel=2e-5)
    assert results[0]["state"].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(results[0]["state"][name], value, rtol=1e-4, atol=1e-5)
    packed = load_packed_model(folder / "packed")
    full = sum(parameter.numel() for parameter in packed.parameters() if parameter.dtype == torch.uint8)
    layers = sum(isinstance(module, PackedLinear) for module in packed.modules())
    assert full < 0.3 * 2 * sum(m.in_features * m.out_features for m in packed.modules() if isinstance(m, PackedLinear))
    for result in results:
        held, whole = result["loaded"]
        assert whole == full and held <= full / 2 + 3 * layers, "1/world of the bytes while it is loaded"
        assert 2 * result["held"] == full + result["padding"], "and between steps"


@pytest.mark.parametrize(("zero", "transport"), [({"stage": 3}, "shm"), ({"stage": 3, **OFFLOADED}, "gloo")])
def test_packed_experts_train_as_in_one_process(zero: dict[str, Any], transport: str, tmp_path: Path) -> None:
    """Ranks reach different experts, each of which has adapters of its own."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 41, "tie_word_embeddings": False}
    build_causal("qwen2_moe", 2, **sizes).save_pretrained(tmp_path / "wide")
    report = write_packed_directory(tmp_path / "wide", tmp_path / "packed", FORMAT)
    assert any(".experts." in layer for layer in report.layers)
    losses, state = plain(tmp_path)
    assert any(".experts." in name for name in state)
    results = run_ranks(train, 2, str(tmp_path / "packed"), None, zero, transport=transport)
    assert results[0]["losses"] == pytest.approx(losses, rel=2e-5)
    for name, value in state.items():
        torch.testing.assert_close(results[0]["state"][name], value, rtol=1e-4, atol=1e-5)
    for result in results:
        assert 2 * result["held"] == result["loaded"][1] + result["padding"]


WIDE = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 41}  # ranks split no quantization group of 32


def pipelined(source: str) -> list[float]:
    from transformers import AutoModelForCausalLM

    config = {**base_config({"stage": 1}), "gradient_accumulation_steps": 2, "parallel": {"pp": 2}}
    engine = windlass.initialize(
        model=adapted(windlass.from_pretrained(AutoModelForCausalLM, source, config=config)), config=config
    )[0]
    parts = [[{"input_ids": rows, "labels": rows} for rows in ids(step).chunk(2)] for step in range(STEPS)]
    losses = [float(engine.train_batch(iter(part))) for part in parts]
    engine.destroy()
    return losses


@pytest.mark.parametrize(("keys", "zero"), [(2, {"stage": 3, **OFFLOADED}), (1, {"stage": 0})])
def test_packed_layers_are_sharded_over_tensor_parallel_ranks(keys: int, zero: dict[str, Any], tmp_path: Path) -> None:
    build_causal("llama", num_key_value_heads=keys, **WIDE).save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", FORMAT)
    losses, state = plain(tmp_path)
    results = run_ranks(train, 2, str(tmp_path / "packed"), None, zero, {"tp": 2}, transport="gloo")
    assert results[0]["losses"] == pytest.approx(losses, rel=2e-5)
    assert results[0]["state"].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(results[0]["state"][name], value, rtol=1e-4, atol=1e-5)
    if keys == 2:
        packed = load_packed_model(tmp_path / "packed")
        full = sum(parameter.numel() for parameter in packed.parameters() if parameter.dtype == torch.uint8)
        assert all(result["held"] < 0.51 * full for result in results)
        assert run_ranks(pipelined, 2, str(tmp_path / "packed"), transport="gloo")[0] == pytest.approx(losses, rel=2e-5)


def sectioned(rule: dict[str, Any], parallel: dict[str, int]) -> tuple[list[float], dict[str, Tensor], int]:
    config = {**base_config({"stage": 0}), "weight_quantization": {"post_init_quant": {"proj": rule}}}
    config["parallel"] = parallel
    model = build_causal("llama", **WIDE)
    engine = windlass.initialize(model=model, config=config)[0]
    losses = []
    for step in range(STEPS):
        losses.append(float(loss := engine(input_ids=ids(step), labels=ids(step)).loss))
        engine.backward(loss)
        engine.step()
    held = sum(parameter.numel() for parameter in model.parameters() if parameter.dtype == torch.uint8)
    state = {name: value.detach().clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return losses, state, held


@pytest.mark.parametrize(
    "rule",
    [
        {"num_bits": 3, "group_size": 32, "symmetric": True},
        {"num_bits": 4, "group_size": 16},
        {"num_bits": 8, "group_size": 16, "group_dim": 0},
    ],
)
def test_parts_of_packed_weights_are_those_of_the_whole(rule: dict[str, Any]) -> None:
    losses, state, held = run_ranks(sectioned, 1, rule, {}, transport="gloo")[0]
    found, parts, local = run_ranks(sectioned, 2, rule, {"tp": 2}, transport="gloo")[0]
    assert found == pytest.approx(losses, rel=2e-5) and local < 0.51 * held
    assert parts.keys() == state.keys()
    for name, value in state.items():
        if value.dtype == torch.uint8:
            assert torch.equal(parts[name], value), name
        else:
            torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-5)


def refused() -> tuple[str, list[str]]:
    """Return the error of a layer that cannot be divided, and the names of the parameters that were divided."""
    rule = {"num_bits": 4, "group_size": 128, "symmetric": True}
    config = {**base_config({"stage": 0}), "weight_quantization": {"post_init_quant": {"proj": rule}}}
    model = build_causal("llama", **WIDE)
    with pytest.raises(ModelError) as raised:
        windlass.initialize(model=model, config={**config, "parallel": {"tp": 2}})
    return str(raised.value), [name for name, one in model.named_parameters() if not get_placement(one).is_full]


def test_a_group_that_two_ranks_would_share_is_named_before_any_layer_is_sharded() -> None:
    wanted = r"down_proj is packed as 'int4_g128' and cannot be sharded over tp: .* would end at 96 of its 192 input"
    for message, divided in run_ranks(refused, 2, transport="gloo"):
        assert re.search(wanted, message) and divided == []


def test_a_model_rounded_while_it_loads_equals_the_packed_directory(folder: Path) -> None:
    packed, rounded = load_packed_model(folder / "packed"), load_rounded_model(folder / "wide", FORMAT)
    wanted = packed.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in rounded.state_dict().items())
    with pytest.raises(ModelError, match="is quantized already; load it without weights='int4_g32'"):
        load_rounded_model(folder / "packed", FORMAT)


def test_operations_on_unquantized_weights_are_refused(folder: Path) -> None:
    from peft import LoraConfig

    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(ConfigError, match="which read the base weights, and these are packed"):
            add_adapters(load_packed_model(folder / "packed"), LoraConfig(target_modules="all-linear", **options))
    made = adapted(load_packed_model(folder / "packed"))
    with pytest.raises(ModelError, match="adapters are not merged into packed weights"):
        made.merge_and_unload()
    with made.disable_adapter():
        base = made(input_ids=ids(0)).logits
    assert torch.equal(base, load_packed_model(folder / "packed")(input_ids=ids(0)).logits)
