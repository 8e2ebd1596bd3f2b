"""Steps of the training methods on two ranks: windlass's and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rig.compared_methods import RANKS, Load, TrainingMethod
from rig.models import Sizes, build

LR, DECAY = 1e-4, 0.01
Step = Callable[[torch.Tensor], torch.Tensor | None]
"""Function that trains on this rank's tokens `[samples, length]`, and returns the loss of the batch or of this rank's
part, or None."""


def make(one: TrainingMethod, sizes: Sizes, load: Load) -> Step:
    """Return the function that makes a step. Collective."""
    return _MAKERS[one.how](one, build(sizes), load)


def _windlass(one: TrainingMethod, model: Any, load: Load) -> Step:
    import windlass

    piped = one.how == "windlass-pipeline"
    section = {name: value for name, value in one.axes.items() if name != "schedule"}
    config = {
        "train_micro_batch_size_per_gpu": 1 if piped else load.samples // (1 if one.whole else RANKS),
        "gradient_accumulation_steps": load.samples if piped else 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "parallel": section,
        "steps_per_print": 10**9,
    }
    if piped:
        config["pipeline"] = {"schedule": one.axes["schedule"]}
    engine: Any = windlass.initialize(model=model, config=config)[0]

    def step(tokens: torch.Tensor) -> torch.Tensor:
        if piped:
            return engine.train_batch(iter([{"input_ids": row, "labels": row} for row in tokens.split(1)]))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, fused=True)


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, around: Callable[[], Any] = nullcontext) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        with around():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return step


def _alone(one: TrainingMethod, model: Any, load: Load) -> Step:
    return _plain(model, _adamw(model.parameters()))


def _ddp(one: TrainingMethod, model: Any, load: Load) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return _plain(DistributedDataParallel(model, gradient_as_bucket_view=True), _adamw(model.parameters()))


def _tensor(one: TrainingMethod, model: Any, load: Load) -> Step:
    """Build DTensor's tensor parallelism, sharded as in Megatron. `tensor-loss`: logits stay sharded, by torch's
    loss_parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    cut_loss = one.how == "tensor-loss"
    head = (
        ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        if cut_loss
        else ColwiseParallel(output_layouts=Replicate())
    )
    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": head}
    layer = "model.layers.*."
    plan |= {f"{layer}self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"{layer}mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {f"{layer}self_attn.o_proj": RowwiseParallel(), f"{layer}mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    full = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = _adamw([{"params": cut}, {"params": full}])  # a fused step takes one kind of tensor for each group
    return _plain(model, optimizer, loss_parallel if cut_loss else nullcontext)


def _context(one: TrainingMethod, model: Any, load: Load) -> Step:
    """Build torch's context parallelism: attention passes keys and values around a ring, buffers are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh, optimizer = init_device_mesh("cpu", (RANKS,)), _adamw(model.parameters())

    def step(tokens: torch.Tensor) -> torch.Tensor:
        ids, positions = tokens.clone(), torch.arange(tokens.shape[1]).unsqueeze(0)
        labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        count = (labels != -100).sum()
        with context_parallel(mesh, buffers=[ids, positions, labels], buffer_seq_dims=[1, 1, 1]):
            loss = model(
                input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels, num_items_in_batch=count
            ).loss
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss

    return step


class _Part(nn.Module):
    """Half of a Llama: its layers, and the embedding or the head."""

    def __init__(self, model: Any, place: int) -> None:
        super().__init__()
        half = len(model.model.layers) // RANKS
        self.layers = model.model.layers[place * half : (place + 1) * half]
        self.rotary = model.model.rotary_emb
        self.embedding = model.model.embed_tokens if place == 0 else None
        self.norm = model.model.norm if place == RANKS - 1 else None
        self.head = model.lm_head if place == RANKS - 1 else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotated = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotated)
        return hidden if self.norm is None else self.head(self.norm(hidden))


def _pipeline(one: TrainingMethod, model: Any, load: Load) -> Step:
    """Build torch.distributed.pipelining on the same layers, with micro-batches of one sequence."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    place = dist.get_rank()
    part = _Part(model, place)
    stage = PipelineStage(part, place, RANKS, torch.device("cpu"))
    kinds = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
    schedule = kinds[one.axes["schedule"]](stage, load.samples, loss_fn=_next_token)
    optimizer = _adamw(part.parameters())

    def step(tokens: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        if place == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean() if losses else None

    return step


def _next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


_MAKERS: dict[str, Callable[[TrainingMethod, Any, Load], Step]] = {
    "windlass": _windlass,
    "windlass-pipeline": _windlass,
    "alone": _alone,
    "ddp": _ddp,
    "tensor": _tensor,
    "tensor-loss": _tensor,
    "context": _context,
    "pipeline": _pipeline,
}
