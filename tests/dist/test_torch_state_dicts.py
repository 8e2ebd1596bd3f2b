"""Tests that plain PyTorch and engines resume from each other's states, and that no call returns sharded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.harness import run_ranks
from tests.dist.test_deepspeed_resume import Net, batch, groups_of, steps

RANKS = 2
LR = {"lr": 0.01, "eps": 1e-6}


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": zero, **more}


def engine_for(stage: int, seed: int, **zero: Any) -> Any:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), **LR)
    return windlass.initialize(model=model, optimizer=optimizer, config=config_of(stage, zero=zero))[0]


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[list[float]]:
    """Train in one process on the data of all ranks. Return each rank's losses."""
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    for step in range(first, last):
        optimizer.zero_grad()
        for rank in range(RANKS):
            loss = model(batch(step, rank))
            (loss / RANKS).backward()
            losses[rank].append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def saved_by_an_engine(folder: str, stage: int) -> list[float]:
    engine = engine_for(stage, 0)
    steps(engine, 0, 3)
    with torch.no_grad():
        engine.module.count.add_(5)
    engine.save_checkpoint(folder, client_state={"epoch": 2})
    losses = steps(engine, 3, 6)
    engine.destroy()
    return losses


def assert_close(found: list[list[float]], wanted: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=0)


@pytest.mark.parametrize("stage", [0, 3])
def test_plain_pytorch_resumes_from_a_checkpoint(stage: int, tmp_path: Path) -> None:
    expected = run_ranks(saved_by_an_engine, RANKS, str(tmp_path), stage)
    torch.manual_seed(9)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model)[::-1], **LR)  # groups in another order than the engine's
    actual = windlass.read_checkpoint(tmp_path)
    state = actual.model_state_dict()
    assert set(state) == set(model.state_dict()) and actual.global_steps == 3 and actual.client_state == {"epoch": 2}
    model.load_state_dict(state, strict=True)
    assert torch.equal(model.count, torch.full((3,), 5.0))
    optimizer.load_state_dict(actual.optimizer_state_dict(model, optimizer))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    assert_close(plain_steps(model, optimizer, 3, 6), expected)


def taken_by_an_engine(stage: int, state: dict[str, Tensor], optimizer: dict[str, Any]) -> list[float]:
    engine = engine_for(stage, 50)
    assert engine.load_module_state_dict(state) == ([], [])
    fused = [group.get("fused") for group in engine.optimizer.param_groups]
    engine.optimizer.load_state_dict(optimizer)
    assert [group.get("fused") for group in engine.optimizer.param_groups] == fused, "how, not what"
    losses = steps(engine, 3, 6)
    assert torch.equal(engine.module.count, torch.full((3,), 7.0))
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_engine_resumes_from_plain_pytorch(stage: int) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model), **LR)
    plain_steps(model, optimizer, 0, 3)
    model.count.fill_(7)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    saved = torch.optim.AdamW(groups_of(model), **LR)
    saved.load_state_dict(optimizer.state_dict())
    result = run_ranks(taken_by_an_engine, RANKS, stage, state, saved.state_dict())
    assert_close(result, plain_steps(model, optimizer, 3, 6))


def misfits(folder: str) -> dict[str, Any]:
    engine = engine_for(3, 0, stage3_gather_16bit_weights_on_model_save=False)
    assert engine.save_16bit_model(folder) is False, "the configuration says so"
    before = engine.full_state_dict()
    state = Net().state_dict()
    text = []
    wrong_shape = {**state, "mid.bias": torch.zeros(3)}
    for given in ({k: v for k, v in state.items() if k != "mid.bias"}, {**state, "odd": torch.zeros(1)}, wrong_shape):
        try:
            engine.load_module_state_dict(given)
        except windlass.WindlassError as error:
            text.append(str(error))
    after = engine.full_state_dict()
    same = all(torch.equal(after[name], before[name]) for name in before)
    only = {"head.weight": torch.ones(29, 7), "odd": torch.zeros(1)}
    missing, unexpected = engine.load_module_state_dict(only, strict=False)
    now = engine.full_state_dict()
    engine.destroy()
    return {"said": text, "same": same, "left": (missing, unexpected), "now": now}


def test_mismatch_is_named_and_changes_nothing(tmp_path: Path) -> None:
    result = run_ranks(misfits, RANKS, str(tmp_path))[0]
    assert not list(tmp_path.iterdir())
    missing, unexpected, shape = result["said"]
    assert "missing ['mid.bias'], unexpected []" in missing
    assert "missing [], unexpected ['odd']" in unexpected
    assert "'mid.bias' has shape (3,) in the state dictionary, (7,) here" in shape
    assert result["same"]
    assert "mid.bias" in result["left"][0] and result["left"][1] == ["odd"]
    assert torch.equal(result["now"]["embed.weight"], torch.ones(29, 7)), "by any of a tied parameter's names"


def in_8_bits(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = windlass.optim.CPUAdam(groups_of(model), lr=0.01, state_dtype="8bit")
    config = config_of(2, zero={"offload_optimizer": {"device": "cpu"}})
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    steps(engine, 0, 2)
    engine.save_checkpoint(folder)
    expected = engine.optimizer.state_dict()
    engine.destroy()
    return expected


def test_8_bit_states_are_decoded(tmp_path: Path) -> None:
    expected = run_ranks(in_8_bits, RANKS, str(tmp_path))[0]
    model = Net()
    optimizer = torch.optim.AdamW(groups_of(model))
    actual = windlass.read_checkpoint(tmp_path).optimizer_state_dict(model, optimizer)
    assert actual["state"].keys() == expected["state"].keys()
    for number, states in expected["state"].items():
        for key, value in states.items():
            assert torch.equal(actual["state"][number][key], value.to(actual["state"][number][key].dtype)), (
                number,
                key,
            )
    optimizer.load_state_dict(actual)
    plain_steps(model, optimizer, 2, 3)


def refusals(folder: str) -> dict[str, Any]:
    """Return the errors of calls that would return or write sharded weights at stage 3, and the full weights."""
    from tests.hf_models import gpt2

    engine = windlass.initialize(model=gpt2(), config=config_of(3, optimizer={"type": "AdamW", "params": {}}))[0]
    requested = {
        "state_dict": engine.module.state_dict,
        "engine's": engine.state_dict,
        "save_pretrained": lambda: engine.module.save_pretrained(f"{folder}/out{dist.get_rank()}"),
        "kept": lambda: torch.save(engine.module.state_dict(keep_vars=True), f"{folder}/kept{dist.get_rank()}"),
    }
    text = {}
    for name, ask in requested.items():
        try:
            ask()
        except Exception as error:
            text[name] = f"{type(error).__name__}: {error}"
    engine.save_16bit_model(folder, "model.safetensors")
    with windlass.zero.GatheredParameters(list(engine.module.parameters())):
        full = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    return {"said": text, "whole": full}


def test_no_placeholder_is_returned(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    result = run_ranks(refusals, RANKS, str(tmp_path))[0]
    assert set(result["said"]) == {"state_dict", "engine's", "save_pretrained", "kept"}
    for name, text in result["said"].items():
        assert "ShardedParameterError" in text and "GatheredParameters" in text, name
    assert not list(tmp_path.glob("out*/*.safetensors"))
    written = load_file(tmp_path / "model.safetensors")
    assert set(written) == set(result["whole"]) - {"lm_head.weight"}
    for name, value in written.items():
        assert value.numel() and torch.equal(value, result["whole"][name]), name


class Counter(nn.Module):
    """Layer with an extra state: plain data, or an object that no file can hold."""

    def __init__(self, calls: int = 0, odd: bool = False) -> None:
        super().__init__()
        self.layer, self.calls, self.odd = nn.Linear(4, 4), calls, odd

    def get_extra_state(self) -> Any:
        return object() if self.odd else {"calls": self.calls, "scale": torch.tensor([float(self.calls)])}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert torch.equal(state["scale"], torch.tensor([float(self.calls)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def with_extra_state(folder: str) -> dict[str, Any]:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config_of(3)}
    engine = windlass.initialize(model=nn.Sequential(Counter(7), Counter(1, odd=True)), config=config)[0]
    engine.save_checkpoint(folder)
    state = engine.full_state_dict()
    plain = nn.Sequential(Counter(9), Counter(1))
    engine.load_module_state_dict(plain.state_dict())
    taken = engine.module[0].calls
    engine.load_checkpoint(folder)
    results = {"state": sorted(state), "taken": taken, "loaded": engine.module[0].calls}
    engine.destroy()
    return results


def test_extra_states_and_buffers_are_kept(tmp_path: Path) -> None:
    first, other = run_ranks(with_extra_state, RANKS, str(tmp_path))
    names = sorted(nn.Sequential(Counter(), Counter()).state_dict())
    assert first == {"state": names, "taken": 9, "loaded": 7} and other == {**first, "state": []}
    plain = nn.Sequential(Counter())
    state = windlass.read_checkpoint(tmp_path).model_state_dict()
    plain.load_state_dict({name: value for name, value in state.items() if name.startswith("0.")}, strict=True)
    assert plain[0].calls == 7 and "1._extra_state" not in state
