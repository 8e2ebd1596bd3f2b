"""Tests of batches that are sharded before they reach the model, with windlass's and with DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.dist.harness import RankError, run_ranks
from tests.dist.test_sequence_parallel import (
    VOCABULARY,
    axis_of_all,
    batch,
    build,
    check_close,
    check_mean,
    loss_and_gradients,
)

CASES = [("packed", 13), ("left", 13), ("answers", 14), ("plain", 3)]


class Batches:
    """Loader of full batches with a state."""

    def __init__(self, cases: list[tuple[str, int]]) -> None:
        self.cases, self.epoch, self.state = cases, 0, {"at": 0}

    def __len__(self) -> int:
        return len(self.cases)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (batch(kind, length) for kind, length in self.cases)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def loaded(from_first: bool) -> None:
    """Assert that a model trains on shards as on full batches, and that the storage of a shard holds nothing else."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel, sequence_parallel_of
    from windlass.parallel.sequence.sequence_sharded_loader import SequenceShardedLoader

    axis = axis_of_all()
    plain = build("llama")
    model = build("llama")
    apply_sequence_parallel(model, axis, sp_mode="ring")
    sequence = sequence_parallel_of(model)
    assert sequence is not None
    batches = Batches(CASES) if not from_first or axis.index == 0 else None
    loader = SequenceShardedLoader(batches, sequence, broadcast_from_first=from_first)
    seen = 0
    for (kind, length), part in zip(CASES, loader, strict=True):
        tokens = part["input_ids"].shape[1]
        assert tokens <= length // axis.size + 1
        for value in part.values():
            if isinstance(value, Tensor):
                assert value.untyped_storage().nbytes() == value.nbytes
        model.zero_grad()
        plain.zero_grad()
        loss, gradients = loss_and_gradients(model, part)
        wanted_loss, expected = loss_and_gradients(plain, batch(kind, length))
        check_close(loss, wanted_loss, kind)
        check_mean(axis, gradients, expected, kind)
        seen += tokens
    if batches is not None:
        assert len(loader) == len(CASES)
        loader.set_epoch(4)
        loader.load_state_dict({"at": 2})
        assert batches.epoch == 4 and loader.state_dict() == {"at": 2}


@pytest.mark.parametrize("from_first", [False, True])
def test_model_accepts_sharded_batches(from_first: bool) -> None:
    run_ranks(loaded, 2, from_first)


# ---------------------------------------------------------------------------------------------------- DeepSpeed's names


def own_samples(rank: int, kind: str, length: int) -> dict[str, Tensor]:
    """Return samples whose values and length depend on the rank."""
    given = batch(kind, length + 2 * rank)
    return {name: value.roll(rank, 0) if name != "position_ids" else value for name, value in given.items()}


def registered(
    pads: bool,
    by_name: bool,
    name: str = "llama",
    kinds: tuple[tuple[str, int], ...] = (("packed", 12), ("answers", 13)),
) -> None:
    """Train as a Trainer does: all ranks work on each rank's batch in turn, and losses are weighted by token counts."""
    from windlass.compat.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from windlass.parallel.autograd_collectives import all_gather

    model, plain = build(name), build(name)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="some/name" if by_name else model,
        sequence_parallel_size=2,
        seq_length=None,
        seq_length_is_variable=True,
        core_attn_implementation="sdpa",
        micro_batch_size=2,
        disable_in_eval=True,
    )
    mpu.apply(model)  # the first application if registered by name, else the second
    world, rank = dist.get_world_size(), dist.get_rank()
    assert mpu.get_sequence_parallel_world_size() == 2 and mpu.get_sequence_parallel_rank() == rank % 2
    assert mpu.get_data_parallel_world_size() == world // 2 and mpu.get_data_parallel_rank() == rank // 2
    assert mpu.get_sequence_data_parallel_world_size() == world and mpu.get_model_parallel_world_size() == 1
    group = mpu.get_sequence_parallel_group()
    local = [own_samples(rank, kind, length) for kind, length in kinds]
    adapter = UlyssesSPDataLoaderAdapter(local, rank % 2, group, 2, "cpu", pad_to_sp_multiple=pads)
    first = rank - rank % 2
    wholes = [own_samples(first + other, kind, length) for kind, length in kinds for other in range(2)]
    assert len(adapter) == len(wholes)
    for full, part in zip(wholes, adapter, strict=True):
        model.zero_grad()
        plain.zero_grad()
        assert "labels" not in part and part["input_ids"].shape == part["position_ids"].shape
        model.train()
        output = model(**{k: v for k, v in part.items() if k != "shift_labels"}, shift_labels=part["shift_labels"])
        own = model.loss_function(
            logits=output.logits, labels=None, shift_labels=part["shift_labels"], vocab_size=VOCABULARY
        )
        if world == 2:  # as transformers does; over gloo, the backward of all_gather supports only the world group
            losses = torch.stack(torch.distributed.nn.functional.all_gather(own, group=group))
        else:
            losses = all_gather(own.view(1), mpu.sp, 0)
        counts = mpu.sp.all_gather((part["shift_labels"] != -100).sum().view(1))
        loss = (losses * counts).sum() / counts.sum()
        loss.backward()
        wanted_loss, expected = loss_and_gradients(plain, dict(full))
        check_close(loss.detach(), wanted_loss, "loss")
        axis = mpu.sp
        for name, parameter in model.named_parameters():
            mean = axis.all_reduce(parameter.grad.clone()) / axis.size
            check_close(mean, expected[name], name)
    assert next(adapter, "the next epoch begins") is not None
    model.eval()
    check_close(model(wholes[0]["input_ids"]).logits, plain(wholes[0]["input_ids"]).logits, "evaluation")


@pytest.mark.parametrize(("world", "pads", "by_name"), [(2, True, False), (2, False, True), (4, True, False)])
def test_a_registered_model_and_its_loader(world: int, pads: bool, by_name: bool) -> None:
    run_ranks(registered, world, pads, by_name)


@pytest.mark.parametrize("pads", [True, False])
def test_derived_positions_are_those_of_whole_sequences(pads: bool) -> None:
    """Positions derived from the mask (OPT) or from non-padding ids (RoBERTa) are those of full sequences.

    A shard alone does not determine these positions.
    """
    for name in ("opt", "roberta"):
        run_ranks(registered, 2, pads, False, name, (("left", 13), ("holes", 12), ("plain", 13)))


def shared_positions(pads: bool, positions: list[int]) -> None:
    """Assert that positions `[1, tokens]`, which all samples share, are sharded like the ids."""
    from windlass.compat.ulysses_sp import UlyssesSPDataLoaderAdapter
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    model, plain = build("llama"), build("llama")
    apply_sequence_parallel(model, axis, pre_sharded=True)
    full = {**batch("plain", len(positions)), "position_ids": torch.tensor([positions])}
    wanted_loss, expected = loss_and_gradients(plain, full)
    group = axis.group.process_group
    adapter = UlyssesSPDataLoaderAdapter([full], axis.index, group, axis.size, "cpu", pad_to_sp_multiple=pads)
    for part in adapter:
        assert part["position_ids"].shape == (1, part["input_ids"].shape[1])
        model.zero_grad()
        loss, gradients = loss_and_gradients(model, {**part, "labels": part.pop("shift_labels")})
        check_close(loss, wanted_loss, "loss")
        check_mean(axis, gradients, expected, "gradients")


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]], ids=["plain", "packed"])
def test_positions_that_all_samples_share_are_sharded(pads: bool, positions: list[int]) -> None:
    run_ranks(shared_positions, 2, pads, positions)


def keys_of_ranks(order: bool) -> None:
    """Yield batches whose keys differ between ranks: in their order, or one rank has one more."""
    from windlass.compat.ulysses_sp import UlyssesSPDataLoaderAdapter

    axis = axis_of_all()
    given = batch("left", 8)
    if axis.index == 1:
        given = dict(reversed(given.items())) if order else {name: given[name] for name in ("input_ids", "labels")}
    adapter = UlyssesSPDataLoaderAdapter([given], axis.index, axis.group.process_group, axis.size, "cpu")
    parts = [part["attention_mask"] for part in adapter]
    assert all(torch.equal(axis.all_gather(part, 1), batch("left", 8)["attention_mask"]) for part in parts)


def test_batches_of_the_ranks_may_have_their_keys_in_any_order_but_not_different_ones() -> None:
    run_ranks(keys_of_ranks, 2, True)
    with pytest.raises(RankError, match="DataError: the batches of the ranks along sp have different keys"):
        run_ranks(keys_of_ranks, 2, False)


def epochs() -> None:
    from windlass.compat.ulysses_sp import UlyssesSPDataLoaderAdapter

    class Epochs(Batches):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            ids = torch.full((1, 4), self.epoch)  # fixed when the iterator is made, as the order of a sampler is
            return iter([{"input_ids": ids, "labels": ids}])

    axis, batches = axis_of_all(), Epochs([])
    adapter = UlyssesSPDataLoaderAdapter(batches, axis.index, axis.group.process_group, axis.size, "cpu")
    for epoch in (3, 4, 5):
        batches.set_epoch(epoch)
        assert [int(part["input_ids"][0, 0]) for part in adapter] == [epoch] * axis.size


def test_an_epoch_begins_with_its_first_batch() -> None:
    run_ranks(epochs, 2)


def attend(query: Tensor, key: Tensor, value: Tensor, tokens_first: bool = True) -> Tensor:
    """Compute full-sequence attention in the tensor layout and the token order of `DistributedAttention`."""
    order = (1, 2, 0, 3) if tokens_first else (0, 2, 1, 3)
    q, k, v = (x.permute(order) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute((2, 0, 1, 3) if tokens_first else (0, 2, 1, 3))


def distributed_attention(tokens_first: bool, heads: int, keys: int, sizes: list[int]) -> None:
    from windlass.compat.distributed_attention import DistributedAttention

    axis = axis_of_all()
    torch.manual_seed(0)
    length = sum(sizes)
    along = 0 if tokens_first else 1
    shape = [length, 2] if tokens_first else [2, length]
    full = [torch.randn(*shape, n, 8).requires_grad_() for n in (heads, keys, keys)]
    expected = attend(*full, tokens_first=tokens_first)
    start = sum(sizes[: axis.index])
    own = [x.detach().narrow(along, start, sizes[axis.index]).clone().requires_grad_() for x in full]
    layer = DistributedAttention(
        lambda q, k, v: attend(q, k, v, tokens_first),
        axis.group.process_group,
        2,
        0 if tokens_first else 1,
        num_kv_heads=keys,
    )
    actual = layer(*own, 1 if tokens_first else 0)
    check_close(actual, expected.narrow(along, start, sizes[axis.index]), "output")
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(gradient)
    actual.backward(gradient.narrow(along, start, sizes[axis.index]))
    for item, other in zip(own, full, strict=True):
        check_close(item.grad, other.grad.narrow(along, start, sizes[axis.index]), "gradient")


@pytest.mark.parametrize(
    ("tokens_first", "heads", "keys", "sizes"),
    [(True, 4, 4, [6, 6]), (False, 4, 2, [5, 4]), (True, 7, 7, [3, 3, 3, 3]), (False, 4, 1, [2, 5, 1, 4])],
)
def test_user_defined_attention(tokens_first: bool, heads: int, keys: int, sizes: list[int]) -> None:
    run_ranks(distributed_attention, len(sizes), tokens_first, heads, keys, sizes)


def cross_entropy() -> None:
    from windlass.compat.distributed_attention import vocab_sequence_parallel_cross_entropy

    axis = axis_of_all()
    torch.manual_seed(0)
    sizes = [3, 2]
    logits, target = torch.randn(5, 2, 11, requires_grad=True), torch.randint(0, 11, (5, 2))
    start = sum(sizes[: axis.index])
    own = logits.detach().narrow(0, start, sizes[axis.index]).clone().requires_grad_()
    labels = target.narrow(0, start, sizes[axis.index])
    actual = vocab_sequence_parallel_cross_entropy(own, labels, axis.group.process_group)
    expected = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(5, 2)
    check_close(actual, expected, "losses")
    actual.square().sum().backward()
    expected.square().sum().backward()
    check_close(own.grad, logits.grad.narrow(0, start, sizes[axis.index]), "gradient")


def sharded_cross_entropy() -> None:
    """Shard tokens over one axis and the vocabulary over the other."""
    from windlass.base.errors import ConfigError
    from windlass.compat.distributed_attention import vocab_sequence_parallel_cross_entropy

    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, sp = pairs[rank // 2], pairs[2 + rank % 2]
    torch.manual_seed(0)
    logits, target = torch.randn(5, 2, 11, requires_grad=True), torch.randint(0, 11, (5, 2))
    target[1, 0] = -1
    tokens, words = [slice(3), slice(3, 5)][rank // 2], [slice(6), slice(6, 11)][rank % 2]
    own = logits.detach()[tokens, :, words].clone().requires_grad_()
    bounds = words.start or 0, words.stop
    for reduction in ("none", "sum", "mean"):
        expected = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction=reduction
        )
        actual = vocab_sequence_parallel_cross_entropy(
            own, target[tokens], sp, tp, *bounds, -1, reduction, reduction == "none"
        )
        check_close(actual.flatten(), expected.flatten(), reduction)
        own.grad = logits.grad = None
        actual.square().sum().backward()
        expected.square().sum().backward()
        check_close(own.grad, logits.grad[tokens, :, words], reduction)
    alone = vocab_sequence_parallel_cross_entropy(own, target[tokens], None, tp, None, None, -1, "none", False)
    assert alone.shape == target[tokens].shape
    moved = {
        "vocab_start_index": rank % 2 * 7,
        "vocab_end_index": 6 if rank % 2 == 0 else 11,
    }  # wrong on one rank of two
    for wrong in (moved, {"backend": "liger"}, {"reduction": "mean"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            vocab_sequence_parallel_cross_entropy(own, target[tokens], sp, tp, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank 1 of tp_group has logits of 0 words"):
        vocab_sequence_parallel_cross_entropy(own[..., : 6 - 6 * (rank % 2)], target[tokens], sp, tp)


@pytest.mark.parametrize(("of", "world"), [(cross_entropy, 2), (sharded_cross_entropy, 4)])
def test_cross_entropy_of_all_tokens(of: Callable[[], None], world: int) -> None:
    run_ranks(of, world)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 20), nn.Linear(20, 6)


def _mlp(self: _Layer, x: Tensor) -> Tensor:
    return self.down(self.up(x).relu())


def test_tiled_computations_under_deepspeed_names() -> None:
    from windlass.compat.tiled_compute import (
        SequenceTiledCompute,
        TiledFusedLogitsLoss,
        TiledMLP,
        sequence_tiled_compute,
    )

    torch.manual_seed(0)
    layer = _Layer()
    hidden, labels = torch.randn(2, 9, 6, requires_grad=True), torch.randint(0, 6, (2, 9))
    inputs = [hidden, *layer.parameters()]

    def same(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted)
        weights = torch.rand_like(wanted)
        graded = [torch.autograd.grad(item, inputs, weights, retain_graph=True) for item in (found, wanted)]
        torch.testing.assert_close(*graded)

    def loss(self: _Layer, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        losses = functional.cross_entropy(_mlp(self, x).flatten(0, -2), y.flatten(), reduction="none")
        return losses.sum() if mask is None else (losses * mask.flatten()).sum()

    full = _mlp(layer, hidden)
    same(TiledMLP.apply(_mlp, layer, hidden, 4, list(layer.parameters())), full)
    same(TiledMLP.apply(_mlp, layer, hidden, 2, None), full)
    parameters = list(layer.parameters())
    for shards in (1, 3, 4):
        same(
            TiledFusedLogitsLoss.apply(loss, layer, hidden, labels, None, shards, None, "sum"),
            loss(layer, hidden, labels),
        )
        mask = torch.rand(2, 9).round()
        actual = TiledFusedLogitsLoss.apply(loss, layer, hidden, labels, mask, shards, parameters, "mean")
        parts = -(-18 // -(-18 // shards))
        same(actual, loss(layer, hidden, labels, mask) / parts)
    shard, passed = {"x": hidden, "y": labels}, {"self": layer}
    same(sequence_tiled_compute(lambda x, y, self: _mlp(self, x), 9, 4, shard, passed, "x", parameters, 1, None), full)
    for shards in (1, 2, 3, 5):  # not all of these divide the 9 tokens
        actual = sequence_tiled_compute(loss, 9, shards, shard, passed, "x", None, 0, "sum")
        same(actual, loss(layer, hidden, labels))
        arguments = ["x", "y"], ["self"], "x", parameters, 0, "mean", hidden, labels, layer
        same(SequenceTiledCompute.apply(loss, 9, shards, *arguments), loss(layer, hidden, labels) / shards)


@pytest.mark.parametrize("form", ["weight", "closure", "partial", "list", "object", "method", "experts"])
def test_parameters_of_tiled_functions_are_found(form: str) -> None:
    from windlass.compat.tiled_compute import sequence_tiled_compute

    torch.manual_seed(0)
    layer, second = nn.Linear(6, 6), nn.Linear(6, 6)
    x = torch.randn(2, 9, 6)
    functions: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
        "weight": (lambda x, w: functional.linear(x, w), {"w": layer.weight}),
        "closure": (lambda x: layer(x), {}),
        "partial": (partial(lambda layer, x: layer(x), layer), {}),
        "list": (lambda x, layers: layers[0](x), {"layers": [layer]}),
        "object": (lambda x, holder: holder.head(x), {"holder": SimpleNamespace(head=layer)}),
        "method": (layer.forward, {}),
        "experts": (lambda x, layers: layers[int(x.shape[1] < 5)](x), {"layers": [layer, second]}),
    }
    function, passed = functions[form]
    name = "input" if form == "method" else "x"
    sequence_tiled_compute(function, 9, 2, {name: x}, passed, name, None, 1, "sum").backward()
    actual = layer.weight.grad
    assert actual is not None
    layer.weight.grad = None
    if form == "experts":
        layer(x[:, :5]).sum().backward()
    else:
        layer(x).sum().backward()
    torch.testing.assert_close(actual, layer.weight.grad)


def wrong() -> list[str]:
    from windlass.base.errors import WindlassError
    from windlass.compat.distributed_attention import DistributedAttention
    from windlass.compat.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    axis = axis_of_all()
    text = []
    group = axis.group.process_group
    register = UlyssesSPAttentionHF.register_with_transformers
    short = [{"input_ids": torch.ones(1, 1), "labels": torch.ones(1, 1)}]
    calls: list[Any] = [
        lambda: register(build("llama"), "eager", 2),
        lambda: register(build("llama"), "sdpa", 3),
        lambda: DistributedAttention(attend, group, 1, 0),
        lambda: DistributedAttention(attend, group)(*[torch.ones(2, 1, 2, 4)] * 3, 1, rotary_pos_emb=(1, 2)),
        lambda: next(UlyssesSPDataLoaderAdapter([{"input_ids": torch.ones(1, 4)}], axis.index, group, 2, "cpu")),
        lambda: next(UlyssesSPDataLoaderAdapter(short, axis.index, group, 2, "cpu")),
    ]
    for call in calls:
        try:
            call()
        except WindlassError as error:
            text.append(str(error))
    return text


def test_invalid_loaders_are_refused() -> None:
    text = run_ranks(wrong, 2)
    assert text[0] == text[1]
    expected = ["eager", "sequence_parallel_size = 3", "scatter_idx = 1", "rotary_pos_emb", "labels", "1 tokens"]
    assert len(text[0]) == len(expected)
    for actual, words in zip(text[0], expected, strict=True):
        assert words in actual
