"""Engines on one GPU: windlass at a stage, and the plain PyTorch loops that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rig.clock import Step
from windlass.base.errors import ConfigError

PLAIN = ("master", "autocast", "pure")
STAGES = ("windlass-0", "windlass-1", "windlass-2", "windlass-3")
_CLIP, _SEED = 1.0, 0
_ADAM: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


@dataclass(frozen=True)
class Shape:
    """Size of the model and its batches: `hidden` is a multiple of 64, the size of a head."""

    hidden: int
    layers: int
    vocabulary: int
    length: int
    batch: int


@dataclass(frozen=True)
class Contender:
    """Model in training; `end` frees it."""

    step: Step
    end: Callable[[], None]
    parameters: int


def batches(shape: Shape, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield batches of tokens, equal for every engine, created on the device, so that a step contains no copy."""
    draw = torch.Generator(device).manual_seed(_SEED)
    while True:
        yield torch.randint(shape.vocabulary, (shape.batch, shape.length), generator=draw, device=device)


def build(engine: str, shape: Shape, device: torch.device) -> Contender:
    """Build `engine` on a new model, with the same values for each engine.

    Raises:
        ConfigError: there is no such engine.
    """
    plain = {"master": _master, "autocast": _autocast, "pure": _pure}
    if engine not in plain and engine not in STAGES:
        raise ConfigError(f"engine {engine!r} does not exist; use one of {', '.join((*STAGES, *PLAIN))}")
    model = _model(shape).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    if engine in plain:
        return Contender(plain[engine](model), lambda: None, parameters)
    step, end = _windlass(model, int(engine[-1]), shape)
    return Contender(step, end, parameters)


def _model(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(_SEED)
    heads = shape.hidden // 64
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _windlass(model: nn.Module, stage: int, shape: Shape) -> tuple[Step, Callable[[], None]]:
    import windlass

    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "optimizer": {"type": "AdamW", "params": _ADAM},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "gradient_clipping": _CLIP,
        "steps_per_print": 10**9,
    }
    engine, _, _, _ = windlass.initialize(model=model, config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, engine.destroy


def _master(model: nn.Module) -> Step:
    """Return a step that updates fp32 copies: gradients are cast to fp32 before clipping, and the copies are cast
    back."""
    wide = [p.detach().float().clone() for p in model.parameters()]
    _narrow(model)
    narrow = list(model.parameters())
    optimizer = torch.optim.AdamW(wide, fused=True, **_ADAM)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for copy, parameter in zip(wide, narrow, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(wide, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for copy, parameter in zip(wide, narrow, strict=True):
                parameter.copy_(copy)
        return loss.detach()

    return step


def _narrow(model: nn.Module) -> None:
    """Cast only the parameters to bf16: buffers such as position tables keep their precision, as under windlass."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def _autocast(model: nn.Module) -> Step:
    device = next(model.parameters()).device
    return _plain(model, lambda: torch.autocast(device.type, dtype=torch.bfloat16))


def _pure(model: nn.Module) -> Step:
    _narrow(model)
    return _plain(model, lambda: torch.autocast("cpu", enabled=False))


def _plain(model: nn.Module, context: Callable[[], torch.autocast]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_ADAM)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with context():
            loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
