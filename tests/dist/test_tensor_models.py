"""Models that tensor parallelism does not know, values that come from files, and parameters that are cut already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.causal_models import CAUSAL, VOCABULARY, build, language
from tests.dist.harness import RankError, run_ranks
from tests.dist.tensor_cases import (
    EXACT,
    pair,
    stepped,
    tensor_axis,
    whole_values,
)
from tests.oracle import relative_error
from windlass.comm.grid import Grid
from windlass.comm.mesh import build_mesh
from windlass.parallel.placement import Placement, along, place, placement_of, spread
from windlass.parallel.tensor import (
    apply_tensor_parallel,
    assemble,
    load_part,
)


class Mixer(nn.Module):
    """Attention with two key heads for four query heads, all fused by sections, and a number of heads that it keeps
    under a name that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = 4
        self.everything = nn.Linear(32, 32 + 16 + 16)
        self.back = nn.Linear(32, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = self.everything(hidden)
        size = made.shape[-1] // 8
        query, key, value = made.split([4 * size, 2 * size, 2 * size], -1)
        query, key, value = (one.unflatten(-1, (-1, 8)).transpose(1, 2) for one in (query, key, value))
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.back(mixed.transpose(1, 2).flatten(2))


class Widened(nn.Module):
    """A feed-forward block whose layers are called like nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(40, 32)
        self.gates = nn.Linear(32, 80)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gates(hidden).chunk(2, -1)
        return self.out(functional.silu(gate) * up)


class Strange(nn.Module):
    """A model of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.steps = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "mix": Mixer(), "wide": Widened()}) for _ in range(2)
        )
        self.say = nn.Linear(32, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(ids)
        for step in self.steps:
            hidden = hidden + step["mix"](step["norm"](hidden))
            hidden = hidden + checkpoint(step["wide"], hidden, use_reentrant=False)
        return self.say(hidden)


TABLE = {
    r"steps\.\d+\.mix\.everything": "column:32+16+16 of 4+2+2 heads",
    r"steps\.\d+\.mix\.back": "row of 4 heads",
    r"steps\.\d+\.wide\.gates": "column:40+40",
    r"steps\.\d+\.wide\.out": "row",
    "tokens|say": "vocabulary",
}


def strange() -> tuple[float, tuple[float, str]]:
    torch.manual_seed(0)
    plain, model, axis = Strange(), Strange(), tensor_axis()
    model.load_state_dict(plain.state_dict())
    apply_tensor_parallel(model, axis, table=TABLE)
    logits = 0.0
    for seed in range(3):
        batch = language(seed)
        want, have = plain(batch["input_ids"]), model(batch["input_ids"])
        logits = max(logits, relative_error({"logits": have}, {"logits": want})[0])
        for one, said in ((plain, want), (model, have)):
            functional.cross_entropy(said.flatten(0, 1), batch["labels"].flatten()).backward()
            stepped(one)
    return logits, relative_error(whole_values(model, axis), dict(plain.named_parameters()))


def test_a_table_cuts_a_model_that_nobody_knows() -> None:
    for logits, parameters in run_ranks(strange, 2):
        assert logits < EXACT
        assert parameters[0] < EXACT, parameters


def placed(name: str) -> tuple[int, int, bool]:
    """Elements here, and in all, and whether shared weights still are."""
    _, model, _, _ = pair(name, {}, {})
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    here = sum(parameter.numel() for parameter in model.parameters())
    return here, sum(torch.Size(placement_of(one).shape).numel() for one in model.parameters()), tied


def test_tied_weights_stay_tied_and_memory_is_shared_out() -> None:
    (first, whole, tied), (second, _, also) = run_ranks(placed, 2, "gpt2")
    norms_and_biases = 2 * (4 * 24 + 24 + 24) + 2 * 24 + 32 * 24  # with the embedding of positions
    assert first + second == whole + norms_and_biases
    assert tied and also


class Counted:
    """A tensor of a file that is read in parts, and how many elements were read."""

    def __init__(self, source: Any, read: list[int]) -> None:
        self._source, self._read = source, read

    def get_shape(self) -> list[int]:
        return list(self._source.get_shape())

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._source[index]
        self._read.append(part.numel())
        return part


def read_in_parts(name: str, path: str) -> tuple[float, int, int, int]:
    from safetensors import safe_open

    plain, axis = build(name), tensor_axis()
    with torch.device("meta"):
        model = CAUSAL[name]()
    apply_tensor_parallel(model, axis)
    assert all(parameter.is_meta for parameter in model.parameters())
    read: list[int] = []
    with safe_open(path, "pt") as file:
        stored = set(file.keys())

        def find(key: str) -> Counted:
            if key not in stored:
                raise KeyError(key)
            return Counted(file.get_slice(key), read)

        missing = load_part(model, find)
    buffers = dict(plain.named_buffers())
    assert all(name in buffers for name in missing)  # those that are computed from the configuration
    for key in missing:
        holder, _, leaf = key.rpartition(".")
        setattr(model.get_submodule(holder), leaf, buffers[key])
    with torch.no_grad():
        ids = language(0)["input_ids"]
        wanted, found = plain(input_ids=ids).logits, model(input_ids=ids).logits
    here = sum(parameter.numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in plain.parameters())
    return relative_error({"logits": found}, {"logits": wanted})[0], sum(read), here, whole


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral", "bert"])
def test_each_rank_reads_its_part_alone(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build(name)
    path = tmp_path / "model.safetensors"
    save_file({key: value.detach().clone() for key, value in model.named_parameters()}, path)
    for logits, read, here, whole in run_ranks(read_in_parts, 2, name, str(path)):
        assert logits < EXACT
        assert read == here < 0.7 * whole


def misread() -> None:
    model = build("llama")
    apply_tensor_parallel(model, tensor_axis())
    load_part(model, lambda name: _Small())


class _Small:
    """A tensor of a file that belongs to another model."""

    def get_shape(self) -> list[int]:
        return [3, 3]

    def __getitem__(self, index: Any) -> torch.Tensor:
        raise AssertionError("nothing is read of it")


def test_a_tensor_of_another_shape_is_refused() -> None:
    message = r"'model.embed_tokens.weight' has shape \(3, 3\), and the model's .* \(41, 32\) as a whole"
    with pytest.raises(RankError, match=message):
        run_ranks(misread, 2)


def of_experts() -> tuple[set[str], bool, list[int]]:
    """Experts that lie on other ranks already are cut along their features, and put together from both axes."""
    mesh = build_mesh(Grid(ep=2, tp=2))
    plain, model = build("mixtral"), build("mixtral")
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            span = spread(4, 2, mesh.ep.index)
            whole = tuple(parameter.shape)
            parameter.data = parameter.data[slice(*span)].clone()
            place(parameter, Placement(whole, along(whole, 0, [span]), frozenset({"ep"}), expert=True))
    apply_tensor_parallel(model, mesh.tp)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    placement = placement_of(experts)
    values = dict(plain.named_parameters())
    same = all(
        torch.equal(assemble(value.data, placement_of(value), mesh.ep, mesh.tp), values[name])
        for name, value in model.named_parameters()
    )
    assert placement.expert
    return set(placement.cut), same, list(experts.shape)


def test_experts_may_be_spread_over_other_ranks() -> None:
    found = run_ranks(of_experts, 4)
    assert [shape for _, _, shape in found] == [[2, 32, 32], [2, 16, 32]] * 2  # 2 of 4 experts, 16 + 8 of 24 features
    assert all(cut == {"ep", "tp"} and same for cut, same, _ in found)


def cut_twice() -> None:
    model, axis = build("llama"), tensor_axis()
    apply_tensor_parallel(model, axis)
    apply_tensor_parallel(model, axis)


def test_a_model_is_cut_once() -> None:
    with pytest.raises(RankError, match="model.embed_tokens.weight is cut over tp already; cut a model once"):
        run_ranks(cut_twice, 2)
