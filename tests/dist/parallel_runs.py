"""Training of a transformers model over all axes of the mesh, and in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from tests.causal_models import model_of
from tests.dist.harness import run_ranks

VOCABULARY, LENGTH, ROWS, STEPS = 30, 13, 2, 3
ADAMW: dict[str, Any] = {"lr": 2e-3, "eps": 1e-4, "weight_decay": 0.02}
CLIP = 0.5


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def _language_model(kind: str, *, tied: bool, **values: Any) -> nn.Module:
    return model_of(kind, **{"vocab_size": VOCABULARY, "tie_word_embeddings": tied, **values})


def llama(*, tied: bool, layers: int = 4) -> nn.Module:
    """Return a Llama with 4 query heads and 2 key and value heads."""
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": layers}
    return _language_model("LlamaForCausalLM", tied=tied, **sizes, **_HEADS)


def gpt2(*, tied: bool) -> nn.Module:
    """Return a GPT-2 of four layers with fused queries, keys and values, learned positions, and biases."""
    return _language_model("GPT2LMHeadModel", tied=tied, **_GPT2, **_QUIET)


def mixtral(*, tied: bool) -> nn.Module:
    """Return a Mixtral of two layers with five experts, two per token."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
    return _language_model("MixtralForCausalLM", tied=tied, **sizes, **experts, **_HEADS)


def uneven(*, tied: bool) -> nn.Module:
    """Return a Llama of three layers and three heads, so small that several layers are merged into one unit."""
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 3}
    return _language_model(
        "LlamaForCausalLM", tied=tied, vocab_size=VOCABULARY + 1, max_position_embeddings=64, **sizes
    )


def adapted(base: nn.Module) -> nn.Module:
    """Return a frozen model with LoRA adapters of rank 3 on all linear layers of its blocks."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of transformers about peft, and of peft about Conv1D
        result: nn.Module = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules="all-linear"))
    return result


MODELS: dict[str, Callable[..., nn.Module]] = {
    "uneven": uneven,
    "llama": llama,
    "llama-short": lambda *, tied: llama(tied=tied, layers=1),
    "llama-two": lambda *, tied: llama(tied=tied, layers=2),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "llama-lora": lambda *, tied: adapted(llama(tied=tied)),
    "gpt2-lora": lambda *, tied: adapted(gpt2(tied=tied)),
    "uneven-lora": lambda *, tied: adapted(uneven(tied=tied)),
}


@dataclass(frozen=True)
class Case:
    """Combination of axes and engine settings that must not change the result."""

    model: str
    axes: tuple[tuple[str, int], ...]
    stage: int = 0
    host: bool = False
    tied: bool = False
    sequence: str = "ulysses"
    transport: str = "auto"
    world: int = 0  # number of ranks; 0: the product of the axes
    accumulation: int = 1
    more: tuple[tuple[str, Any], ...] = ()
    zero: tuple[tuple[str, Any], ...] = ()
    under_init: bool = False  # constructed under zero.Init
    optimizer: str = "AdamW"
    params: tuple[tuple[str, Any], ...] = tuple(ADAMW.items())
    bound: float = 1e-5  # for losses, norms and parameters
    bf16: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        taken = 1
        for _, size in self.axes:
            taken *= size
        return self.world or taken

    def __str__(self) -> str:
        axes = "-".join(f"{axis}{size}" for axis, size in self.axes)
        marks = [*(["tied"] if self.tied else []), *(["host"] if self.host else [])]
        marks += ["under_init"] if self.under_init else []
        marks += [self.sequence] if any(axis == "sp" for axis, _ in self.axes) else []
        marks += [self.optimizer] if self.optimizer != "AdamW" else []
        marks += ["bf16"] if self.bf16 else []
        return "-".join([self.model, axes, f"of{self.ranks}", f"stage{self.stage}", *marks])


@dataclass
class Found:
    """Trace of one rank."""

    reader: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)  # by step
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    print: str = ""
    part: tuple[int, int] = (0, 0)  # this rank's index along tp and pp
    replicas: dict[str, torch.Tensor] = field(default_factory=dict)  # the module's own values below stage 3


def build(name: str, *, tied: bool) -> nn.Module:
    """Return the model with the same values on every rank."""
    torch.manual_seed(11)
    model = MODELS[name](tied=tied)
    with torch.no_grad():  # so that a missing bias or norm changes the result
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model


def batch(step: int, micro: int, reader: int) -> dict[str, torch.Tensor]:
    """Return the micro-batch of one data-loading rank: two rows, one of them with ignored labels."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + reader)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[1, : 3 + reader + micro] = -100
    return {"input_ids": ids, "labels": labels}


def config_of(case: Case) -> dict[str, Any]:
    """Return the engine configuration of the case."""
    zero: dict[str, Any] = {"stage": case.stage, "stage3_param_persistence_threshold": 40, **dict(case.zero)}
    if case.host:
        zero["offload_optimizer"] = {"device": "cpu"}
        if case.stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": case.optimizer, "params": dict(case.params)},
        "zero_optimization": zero,
        "parallel": {**dict(case.axes), "sp_mode": case.sequence, **dict(case.more)},
        "comm": {"transport": case.transport},
        "bf16": {"enabled": case.bf16},
    }


def train(
    case: Case, steps: int = STEPS, save: str | None = None, source: str | None = None, save_at: int | None = None
) -> Found:
    """Train on one rank, and save after `save_at` steps, by default after all."""
    import windlass

    config = config_of(case)
    with windlass.zero.Init(enabled=case.under_init):
        model = build(case.model, tied=case.tied)
    assert not case.under_init or windlass.zero.sharded_init.initial_shard.find(next(model.parameters())) is not None
    engine, *_ = windlass.initialize(model=model, config=config)
    if source is not None:
        engine.load_checkpoint(source)
    readers, reader = engine.data_loading_ranks
    result = Found(reader=reader)
    for step in range(engine.global_steps, engine.global_steps + steps):
        batches = [batch(step, micro, reader) for micro in range(case.accumulation)]
        if engine.mesh.pp.size > 1:
            result.losses.append(float(engine.train_batch(iter(batches))))
        else:
            total = 0.0
            for number, item in enumerate(batches):
                loss = engine(**item).loss
                engine.backward(loss)
                total += loss.item() / case.accumulation
                if number == case.accumulation - 1 and step != 1:  # step 1 reads no gradients, as in users' runs
                    named = engine.module.named_parameters()
                    result.grads[step] = {name: _copy(windlass.zero.full_grad(p)) for name, p in named}
                engine.step()
            result.losses.append(total)
        result.norms.append(engine.get_global_grad_norm())
        if save is not None and engine.global_steps == save_at:
            engine.save_checkpoint(save)
    result.part = engine.mesh.tp.index, engine.mesh.pp.index
    if case.stage < 3:
        result.replicas = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    result.params = {n: windlass.zero.full_param(p).detach().clone() for n, p in engine.module.named_parameters()}
    result.print = str(engine.fingerprint())
    result.model = engine.full_state_dict()
    if save is not None and save_at is None:
        engine.save_checkpoint(save)
    engine.destroy()
    return result


def step_once(engine: Any, step: int, accumulation: int) -> None:
    """Take a step with this rank's micro-batches."""
    batches = [batch(step, micro, engine.data_loading_ranks[1]) for micro in range(accumulation)]
    if engine.mesh.pp.size > 1:
        engine.train_batch(iter(batches))
        return
    for item in batches:
        engine.backward(engine(**item).loss)
        engine.step()


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.detach().clone()


@cache
def plain(
    name: str,
    tied: bool,
    readers: int,
    accumulation: int,
    steps: int = STEPS,
    rule: str = "AdamW",
    params: tuple[tuple[str, Any], ...] = tuple(ADAMW.items()),
) -> dict[str, Any]:
    """Train in one process on the batches of all data-loading ranks."""
    from windlass.optim import muon_groups, optimizer_factory

    model = build(name, tied=tied)
    model.train()
    optimizer = optimizer_factory.build_optimizer(
        rule, dict(params), muon_groups(model) if rule == "Muon" else list(model.parameters())
    )
    results: dict[str, Any] = {"losses": [], "norms": [], "grads": []}
    for step in range(steps):
        losses = torch.stack(
            [
                torch.stack([model(**batch(step, micro, reader)).loss for micro in range(accumulation)]).mean()
                for reader in range(readers)
            ]
        )
        losses.mean().backward()
        results["losses"].append(losses.tolist())
        results["grads"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        results["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    results["params"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    results["names"] = set(model.state_dict())
    return results


def near(one: torch.Tensor | None, other: torch.Tensor, what: str, bound: float = 1e-5) -> None:
    """Assert equality up to `bound` times the largest element."""
    assert one is not None and one.shape == other.shape, f"{what}: {None if one is None else one.shape}"
    scale = float(other.abs().max()) or 1.0
    assert float((one - other).abs().max()) <= bound * scale, f"{what}: {float((one - other).abs().max()) / scale}"


def check(case: Case, steps: int = 2) -> list[Found]:
    """Train on ranks, and compare losses, gradients, norms and parameters with one process."""
    return hold_all(case, run_ranks(train, case.ranks, case, steps), plain, steps)


def hold_all(case: Case, actual: list[Found], expect: Callable[..., dict[str, Any]], steps: int) -> list[Found]:
    """Compare the traces of the ranks with that of one process, trained by `expect` on all ranks' batches."""
    readers = 1 + max(item.reader for item in actual)
    expected = expect(case.model, case.tied, readers, case.accumulation, steps, case.optimizer, case.params)
    return hold(case, actual, expected)


def hold(case: Case, found: list[Found], wanted: dict[str, Any], first: int = 0) -> list[Found]:
    """Compare the traces of the ranks with that of one process, from step `first` on."""
    pipelined = dict(case.axes).get("pp", 1) > 1
    for item in found:
        for at in range(len(item.losses)):
            step = first + at
            losses, norm = wanted["losses"][step], wanted["norms"][step]
            loss = sum(losses) / len(losses) if pipelined else losses[item.reader]
            assert abs(item.losses[at] - loss) <= case.bound * abs(loss), f"loss of step {step}"
            assert abs(item.norms[at] - norm) <= case.bound * norm, f"norm of step {step}"
            for name, gradient in item.grads.get(step, {}).items():
                what = f"gradient of {name} in step {step}"
                if name in wanted["grads"][step]:
                    near(gradient, wanted["grads"][step][name], what, 2 * case.bound)
                else:
                    assert gradient is None, what
        for name, value in item.params.items():
            near(value, wanted["params"][name], name, case.bound)
    assert {name for entry in found for name in entry.params} == set(wanted["params"])
    assert set(found[0].model) == wanted["names"]
    for name, value in wanted["params"].items():
        near(found[0].model[name], value, f"{name} in the state dict", case.bound)
    assert len({entry.print for entry in found}) == 1
    return found
