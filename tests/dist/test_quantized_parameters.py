"""Tests of frozen quantised values in a 16-bit engine: they keep their format, and losses equal plain PyTorch's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import windlass
from tests.dist.harness import run_ranks
from windlass.checkpoint.safetensors_export import export_safetensors
from windlass.checkpoint.torch_state_dicts import PlainCheckpoint
from windlass.compat.checkpoint.consolidated import get_fp32_state_dict_from_zero_checkpoint

WIDTH = 24
FP32 = torch.float32
FORMATS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
RECIPES = [(precision, stage) for precision in ("bf16", "fp16") for stage in (0, 1, 2, 3)]


class PackedParameter(nn.Parameter):
    """Subclass of Parameter with a state that the layer reads, like bitsandbytes' `Params4bit`."""

    quant_state: Tensor


def packed(values: Tensor, scale: Tensor) -> PackedParameter:
    """Round the values to 4 bits, and return them two to a byte."""
    pairs = (values.round().clamp(-8, 7).to(torch.int16) + 8).view(-1, 2)
    made = torch.Tensor._make_subclass(PackedParameter, (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8), False)
    made.quant_state = scale
    return made


class QuantizedLinear(nn.Module):
    """Layer with a frozen 8-bit weight, a frozen 4-bit one, an 8-bit buffer, and a trained adapter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.randn(WIDTH, WIDTH) * 6
        values = values.abs() + 0.01 if dtype in (torch.uint8, torch.float8_e8m0fnu) else values
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.table: Tensor
        self.register_buffer("table", values[0].to(dtype))
        self.nibbles = packed(torch.randn(WIDTH * WIDTH) * 3, torch.tensor(0.02))
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype == self.table.dtype == self.dtype and self.nibbles.dtype == torch.uint8
        assert isinstance(self.nibbles, PackedParameter)
        bytes_ = self.nibbles.to(torch.int16)
        pairs = torch.stack([bytes_ // 16 - 8, bytes_ % 16 - 8], -1).float() * self.nibbles.quant_state
        full = self.weight.to(FP32) * 0.005 + pairs.view(WIDTH, WIDTH) + self.table.to(FP32) * 0.001
        x = x.to(self.adapter.weight.dtype)
        return torch.tanh(nn.functional.linear(x, full.to(x.dtype)) + self.adapter(x))


class QuantizedModel(nn.Module):
    """One layer of each format."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(QuantizedLinear(dtype) for dtype in FORMATS.values())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def is_quantized(name: str) -> bool:
    return not name.rpartition(".")[0].endswith("adapter")


def batches(ranks: int) -> Tensor:
    return torch.randn(3, ranks, 4, WIDTH, generator=torch.Generator().manual_seed(3))


def start(precision: str, stage: int, **zero: Any) -> windlass.Engine:
    torch.manual_seed(dist.get_rank())  # ranks draw different values; the engine uses those of rank 0
    config = {
        "train_micro_batch_size_per_gpu": 4,
        precision: {"enabled": True} | ({"loss_scale": 64} if precision == "fp16" else {}),
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    return windlass.initialize(model=QuantizedModel(), config=config)[0]


def quantized_bytes(states: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return dtype and bytes of the quantised values. Pickle cannot carry all of these dtypes."""
    return {
        name: (value.dtype, value.reshape(-1).view(torch.uint8).tolist())
        for name, value in states.items()
        if is_quantized(name)
    }


def trained(folder: str) -> list[tuple[list[float], Any]]:
    results = []
    for precision, stage in RECIPES:
        engine = start(precision, stage)
        losses = []
        for batch in batches(dist.get_world_size()):
            loss = engine(batch[dist.get_rank()])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.save_checkpoint(f"{folder}/{precision}-{stage}")
        with windlass.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            for name, parameter in engine.module.named_parameters():
                if dist.get_rank() == 0 and is_quantized(name):
                    parameter.data.view(torch.uint8).zero_()
        for layer in engine.module.layers:
            layer.table.view(torch.uint8).zero_()
        engine.load_checkpoint(f"{folder}/{precision}-{stage}")
        results.append((losses, quantized_bytes(engine.full_state_dict(dtype=FP32))))
        engine.destroy()
    return results


def plain(precision: str, ranks: int) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = QuantizedModel()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(copy.deepcopy(parameter.data)) for parameter in trained]
    for parameter in trained:
        parameter.data = parameter.data.to(dtype)
    optimizer = torch.optim.SGD(masters, lr=0.5)
    losses = []
    for batch in batches(ranks):
        for rank in range(ranks):
            loss = model(batch[rank])
            loss.backward()
            losses.append(float(loss.detach()))
            for master, parameter in zip(masters, trained, strict=True):
                grad = parameter.grad.float() / ranks
                master.grad = grad if master.grad is None else master.grad + grad
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, trained, strict=True):
                parameter.copy_(master)
    return losses, model


@pytest.mark.parametrize(("ranks", "transport"), [(1, "gloo"), (2, "gloo"), (2, "shm")])
def test_quantized_values_keep_their_format(ranks: int, transport: str, tmp_path: Path) -> None:
    of_ranks = run_ranks(trained, ranks, str(tmp_path), transport=transport)
    expected = {precision: plain(precision, ranks) for precision in ("bf16", "fp16")}
    for number, (precision, stage) in enumerate(RECIPES):
        plain_losses, model = expected[precision]
        for rank, actual in enumerate(of_ranks):
            assert actual[number][0] == pytest.approx(plain_losses[rank::ranks], rel=5e-3), (precision, stage)
        values = quantized_bytes(model.state_dict())
        assert of_ranks[0][number][1] == values, (precision, stage)
        saved = tmp_path / f"{precision}-{stage}"
        assert quantized_bytes(PlainCheckpoint(saved, None).model_state_dict(FP32)) == values
        assert quantized_bytes(get_fp32_state_dict_from_zero_checkpoint(str(saved))) == values
        export_safetensors(saved, saved / "export", dtype=torch.float16)
        assert quantized_bytes(load_file(saved / "export" / "model.safetensors")) == values


def constructed() -> dict[str, torch.dtype]:
    torch.manual_seed(0)
    with windlass.zero.Init(dtype=torch.bfloat16):
        model = QuantizedModel()
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def test_sharded_init_casts_no_quantized_parameter() -> None:
    plain_dtypes = {name: parameter.dtype for name, parameter in QuantizedModel().named_parameters()}
    for result in run_ranks(constructed, 2):
        assert result == {name: dtype if is_quantized(name) else torch.bfloat16 for name, dtype in plain_dtypes.items()}
