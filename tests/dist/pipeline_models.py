"""Models and settings for training over a pipeline: layer sequences of all kinds, and models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hf_models import checkpointed
from tests.models.specimen import cross_entropy
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.mesh_shape import MeshShape
from windlass.comm.point_to_point import exchange_tensors
from windlass.parallel.pipeline.layer_specs import LayerSpec, TiedLayerSpec
from windlass.parallel.pipeline.pipeline_schedules import ScheduleName, build_forward_schedule, build_schedule
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.parallel.pipeline.schedule_executor import ExecutorCallbacks, execute_schedule
from windlass.parallel.pipeline.stage_transfers import StageTransfers
from windlass.parallel.pipeline.staged_model import split_into_stages
from windlass.parallel.pipeline.transfer_order import add_transfers

WIDTH, VOCABULARY, DEPTH = 8, 24, 8
SEED = 77


@dataclass(frozen=True)
class Setting:
    """Schedule, micro-batches per step, and stages per rank."""

    schedule: ScheduleName
    micros: int
    each: int = 1


@dataclass
class Seen:
    """Trace of one step on a rank: losses if the rank computes any, gradients, and received bytes."""

    losses: list[float]
    grads: dict[str, Tensor | None]
    moved: dict[str, int]


class Block(nn.Module):
    """Residual block with a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Several(nn.Module):
    """Block that takes and returns a tuple: a tensor with gradient, two without (one of integers), None, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.table = Block(), nn.Embedding(5, WIDTH)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            count = torch.arange(given.shape[1]) % 5
            return self.block(given), given.detach() * 2, count, None, 3
        x, fixed, count, nothing, number = given
        assert nothing is None and number == 3 and count.dtype == torch.int64 and not fixed.requires_grad
        return self.block(x) + self.table(count) + number * fixed, fixed, count, None, 3


class Named(nn.Module):
    """Block that takes and returns a dict, and passes one tensor on twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()

    def forward(self, given: Any) -> Any:
        a, more = given["a"], given["more"]
        b = self.left(a)
        return {"a": b + self.right(more["x"]), "more": {"x": b, "mask": more["mask"], "again": [b, more["mask"]]}}


class InPlace(nn.Module):
    """Block that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x, inplace=True) + self.block(x)


def first(given: Any) -> Tensor:
    """Layer without parameters that returns the relevant tensor of a tuple or dict."""
    return given["a"] if isinstance(given, dict) else given[0]


def ragged(x: Tensor) -> Tensor:
    """Layer whose output shape depends on values."""
    return x[:, : 1 + int(x.detach().sum().abs() * 7) % x.shape[1]]


def unembed(embedding: nn.Module, x: Tensor) -> Tensor:
    """Use an embedding as the head."""
    return F.linear(x, embedding.weight)


def square(out: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error, ignoring positions of the target beyond the length of the output."""
    return F.mse_loss(out.float(), y[:, : out.shape[1]].float())


def _embedding() -> TiedLayerSpec:
    return TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH)


def _unembedding() -> TiedLayerSpec:
    return TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, forward_fn=unembed)


ROWS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Any]]] = {
    "row": (lambda: [LayerSpec(Block) for _ in range(DEPTH)], square),
    "several": (lambda: [*(LayerSpec(Several) for _ in range(DEPTH)), first], square),
    "named": (lambda: [*(LayerSpec(Named) for _ in range(DEPTH)), first], square),
    "in place": (lambda: [LayerSpec(InPlace) for _ in range(DEPTH)], square),
    "tied": (lambda: [_embedding(), *(LayerSpec(Block) for _ in range(DEPTH)), _unembedding()], cross_entropy),
    "thrice": (
        lambda: [
            _embedding(),
            *(LayerSpec(Block) for _ in range(DEPTH // 2)),
            _unembedding(),
            LayerSpec(nn.Linear, VOCABULARY, WIDTH),
            *(LayerSpec(Block) for _ in range(DEPTH // 2)),
            _unembedding(),
        ],
        cross_entropy,
    ),
}


def row(name: str, **more: Any) -> PipelineSequential:
    """Return a layer sequence in full, or this rank's part of it."""
    torch.manual_seed(SEED)
    kind = name.removesuffix(" frozen").removesuffix(" ragged")
    layers, loss_fn = ROWS[kind]
    result = layers()
    if name.endswith(" ragged"):
        result.insert(DEPTH // 3, ragged)
    return PipelineSequential(result, loss_fn=loss_fn, dynamic_shape=name.endswith(" ragged"), **more)


def freeze(name: str, model: nn.Module) -> None:
    """Freeze the first four layers of the model if `name` ends with "frozen"."""
    if name.endswith(" frozen"):
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.split(".")[0] in "0123":
                parameter.requires_grad_(False)


def row_batch(name: str, micro: int, vary: bool = True) -> Any:
    """Return a pair of inputs and labels. Lengths differ between micro-batches."""
    generator = torch.Generator().manual_seed(500 + micro)
    length = 4 + micro % 3 if vary else 6
    if name in ("tied", "thrice"):
        ids = torch.randint(0, VOCABULARY, (2, length), generator=generator)
        return ids, ids
    x, y = torch.randn(2, 2, length, WIDTH, generator=generator)
    if name.startswith("named"):
        return {"a": x, "more": {"x": x * 0.5, "mask": y > 0}}, y
    return x, y


def transformer(name: str) -> nn.Module:
    """Return a random causal language model of `DEPTH` layers. Tied models share one matrix for embedding and head."""
    import transformers

    torch.manual_seed(SEED)
    base: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if name == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=DEPTH,
            n_head=4,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "mixtral":
        balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        config = transformers.MixtralConfig(**base, **balance, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    if name == "falcon":
        config = transformers.FalconConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=DEPTH, num_attention_heads=4
        )
        return transformers.FalconForCausalLM(config)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**base, tie_word_embeddings=name == "llama tied"))
    if name == "llama checkpointed":
        checkpointed(model, reentrant=False)
    return model


def text(micro: int, vary: bool = True) -> dict[str, Tensor]:
    """Return a language micro-batch with padding. Lengths differ between micro-batches."""
    generator = torch.Generator().manual_seed(900 + micro)
    ids = torch.randint(1, VOCABULARY, (2, 5 + micro % 3 if vary else 6), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -1 - micro % 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def is_row(name: str) -> bool:
    """Return True if the name is a layer sequence, not a model of transformers."""
    return name.removesuffix(" frozen").removesuffix(" ragged") in ROWS


def expected(name: str, micros: int) -> Seen:
    """Run one step in one process with plain accumulation. Return its losses and gradients."""
    model = row(name) if is_row(name) else transformer(name)
    freeze(name, model)
    losses = []
    for micro in range(micros):
        if is_row(name):
            inputs, labels = row_batch(name, micro)
            loss = model.loss_fn(model(inputs), labels)
        else:
            loss = model(**text(micro)).loss
        (loss / micros).backward()
        losses.append(float(loss.detach()))
    return Seen(losses, {key: p.grad for key, p in model.named_parameters()}, {})


def steps(name: str, settings: list[Setting], again: bool = False) -> list[Seen]:
    """Run one step under each setting on this rank of a pipeline over all ranks.

    With `again`, run two steps and return the trace of the second.
    """
    import torch.distributed as dist

    mesh = build_mesh(MeshShape(pp=dist.get_world_size()))
    seen = []
    for setting in settings:
        stages, batches = _stages(name, mesh.pp.index, mesh.pp.size, setting.micros, setting.each)
        model = module_of(stages)
        program = add_transfers(build_schedule(setting.schedule, mesh.pp.size, setting.micros, setting.each))[
            mesh.pp.index
        ]
        passing = StageTransfers(mesh.pp, torch.device("cpu"), has_dynamic_shapes=stages.has_dynamic_shapes)
        for _ in range(1 + again):
            model.zero_grad()
            mesh.pp.traffic.reset()
            around = ExecutorCallbacks(call_module=model, loss_factor=lambda micros=setting.micros: 1 / micros)
            ended = execute_schedule(program, stages, passing, batches, around)
        moved = dict(mesh.pp.traffic.bytes_moved)
        sum_shared_gradients(model, stages.shared_parameters, mesh.pp)
        grads = {key: p.grad for key, p in model.named_parameters()}
        losses = [float(item.loss) for item in ended if item.loss is not None]
        seen.append(Seen(losses, grads, moved))
    mesh.close()
    return seen


def evaluate(name: str, micros: int, each: int) -> tuple[list[float], list[Tensor]]:
    """Return losses and outputs on this rank, without gradients."""
    import torch.distributed as dist

    mesh = build_mesh(MeshShape(pp=dist.get_world_size()))
    stages, batches = _stages(name, mesh.pp.index, mesh.pp.size, micros, each)
    program = add_transfers(build_forward_schedule(mesh.pp.size, micros, each))[mesh.pp.index]
    with torch.no_grad():
        ended = execute_schedule(
            program,
            stages,
            StageTransfers(mesh.pp, torch.device("cpu")),
            batches,
            ExecutorCallbacks(call_module=module_of(stages)),
            keep_outputs=True,
        )
    mesh.close()
    outputs = [item.output if isinstance(item.output, Tensor) else item.output.logits for item in ended]
    return [float(item.loss) for item in ended if item.loss is not None], outputs


def in_16_bits(name: str) -> list[float]:
    """Return the losses of ten steps on one batch in bf16 with plain SGD, on the last rank."""
    import torch.distributed as dist

    mesh = build_mesh(MeshShape(pp=dist.get_world_size()))
    stages, batches = _stages(name, mesh.pp.index, mesh.pp.size, 2, 1)
    model = module_of(stages).to(torch.bfloat16)
    if is_row(name):
        batches = [(x.bfloat16(), y.bfloat16()) for x, y in batches]
    program = add_transfers(build_schedule("1f1b", mesh.pp.size, 2))[mesh.pp.index]
    passing = StageTransfers(mesh.pp, torch.device("cpu"))
    losses = []
    for _ in range(10):
        model.zero_grad()
        ended = execute_schedule(
            program, stages, passing, batches, ExecutorCallbacks(call_module=model, loss_factor=lambda: 0.5)
        )
        sum_shared_gradients(model, stages.shared_parameters, mesh.pp)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad if parameter.grad is not None else 0
        losses += [sum(float(item.loss) for item in ended if item.loss is not None) / 2]
    mesh.close()
    return losses


def unlike() -> None:
    """Run a stage that returns different shapes for equal micro-batches without declaring it."""
    import torch.distributed as dist

    mesh = build_mesh(MeshShape(pp=dist.get_world_size()))
    lengths = iter([4, 2])
    layers = [lambda x: x[:, : next(lengths)], LayerSpec(Block), LayerSpec(Block)]
    model = PipelineSequential(layers, num_stages=2, loss_fn=square)
    x = torch.randn(2, 4, WIDTH)
    program = add_transfers(build_schedule("1f1b", 2, 2))[mesh.pp.index]
    execute_schedule(
        program,
        model,
        StageTransfers(mesh.pp, torch.device("cpu")),
        [(x, x), (x, x)],
        ExecutorCallbacks(call_module=model),
    )


def module_of(stages: Any) -> nn.Module:
    """Return this rank's part of the model."""
    return stages if isinstance(stages, nn.Module) else stages.model


def _stages(name: str, rank: int, ranks: int, micros: int, each: int) -> tuple[Any, list[Any]]:
    """Return a specimen's stages on one rank and the micro-batches of a step."""
    if is_row(name):
        model = row(name, num_stages=ranks, virtual_stages=each)
        freeze(name, model)
        return model, [row_batch(name, micro) for micro in range(micros)]
    result = split_into_stages(transformer(name), rank, ranks, virtual_stages=each)
    return result, [text(micro) for micro in range(micros)]


def sum_shared_gradients(model: nn.Module, shared_parameters: Mapping[str, tuple[int, ...]], axis: MeshAxis) -> int:
    """Replace the gradient of each shared parameter by the sum over the ranks that hold it.

    The sum is taken in rank order, so all ranks get identical bits. Gradients are full (unsharded) and in `.grad`. All
    ranks that hold a shared parameter must call this.

    Returns:
        Bytes that this rank received.
    """
    held = [(ranks, model.get_parameter(name)) for name, ranks in sorted(shared_parameters.items())]
    held = [(ranks, parameter) for ranks, parameter in held if parameter.requires_grad]
    sends: list[tuple[int, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    parts: list[list[torch.Tensor]] = []
    for ranks, parameter in held:
        own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        own = own.contiguous()
        parts.append([])
        for rank in ranks:
            if rank == axis.index:
                parts[-1].append(own)
                continue
            other = torch.empty_like(own)
            sends.append((rank, own.view(-1)))
            receives.append((rank, other.view(-1)))
            parts[-1].append(other)
    moved = exchange_tensors(axis.group, sends, receives)
    axis.traffic.add("shared gradients", 0, moved)
    for (_, parameter), each in zip(held, parts, strict=True):
        total = each[0].clone()
        for part in each[1:]:
            total += part
        parameter.grad = total
    return moved
