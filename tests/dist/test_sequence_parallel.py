"""Tests that sequence parallelism over 2 to 4 ranks gives the same losses and gradients as one process."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share

VOCABULARY = 40
BOUND = 1e-5


# ------------------------------------------------------------------------------------------------------------ models


def build(name: str, **changes: Any) -> Any:
    """Return a tiny random transformers model, the same on all ranks."""
    import transformers as hf

    torch.manual_seed(7)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**small, "num_key_value_heads": 2, **changes}))
    if name == "mistral":
        more = {"num_key_value_heads": 2, "sliding_window": 5}
        return hf.MistralForCausalLM(hf.MistralConfig(**{**small, **more, **changes}))
    if name == "gemma2":
        more = {"num_key_value_heads": 2, "sliding_window": 4, "head_dim": 8, "attn_implementation": "eager"}
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**{**small, **more, "attn_logit_softcapping": 2.0, **changes}))
    if name == "bert":
        more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertModel(hf.BertConfig(**{**small, **more, **changes}), add_pooling_layer=False)
    if name in ("mixtral", "qwen2_moe"):
        more = {"num_key_value_heads": 2, "output_router_logits": True, "router_aux_loss_coef": 0.7}
        if name == "mixtral":
            return hf.MixtralForCausalLM(hf.MixtralConfig(**{**small, **more, "num_local_experts": 5, **changes}))
        sizes = {"num_experts": 6, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**{**small, **more, **sizes, **changes}))
    if name == "modernbert":
        more = {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}
        return hf.ModernBertForMaskedLM(hf.ModernBertConfig(**{**small, **more, **changes}))
    quiet = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "dropout"), 0.0)
    if name == "opt":  # computes positions from the mask
        return hf.OPTForCausalLM(hf.OPTConfig(**{**small, **quiet, "ffn_dim": 48, "word_embed_proj_dim": 32}))
    if name == "biogpt":  # its positions count all tokens, though its embedding could use the mask
        return hf.BioGptForCausalLM(hf.BioGptConfig(**{**small, **quiet, "layerdrop": 0.0, "activation_dropout": 0.0}))
    if name == "roberta":  # its positions count non-padding ids, from 2
        return hf.RobertaForCausalLM(hf.RobertaConfig(**{**small, **quiet, "is_decoder": True}))
    assert name == "gpt2"
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            **{
                "vocab_size": VOCABULARY,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "use_cache": False,
                **changes,
            }
        )
    )


def batch(kind: str, length: int, samples: int = 2) -> dict[str, Tensor]:
    """Return a batch of full sequences."""
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=draw)
    results = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":  # documents with different ends in each sample
        ends = [[0, 3, 4, length], [0, length // 2, length]]
        rows = [torch.cat([torch.arange(b - a) for a, b in zip(e, e[1:], strict=False)]) for e in ends]
        results["position_ids"] = torch.stack(rows)
    elif kind in ("left", "right", "holes"):
        mask = torch.ones_like(ids)
        ids[0, :2] = 1  # id 1 is RoBERTa's padding
        if kind == "left":
            mask[0, :4] = 0
        elif kind == "right":
            mask[0, -5:] = 0
            mask[1, -1:] = 0
        else:
            mask[0, 2:4] = 0
            mask[1, 5:9:2] = 0
        results["attention_mask"] = mask
        results["labels"] = results["labels"].masked_fill(mask == 0, -100)
    elif kind == "answers":  # prompts have no labels, so some shards have none
        results["labels"][:, : length * 2 // 3] = -100
    return results


def loss_and_gradients(model: Any, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and every parameter's gradient."""
    model.train()
    loss = model(**given).loss
    loss.backward()
    return loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


@cache
def whole_loss_and_gradients(
    name: str, changes: tuple[tuple[str, Any], ...], kind: str, length: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of training in one process, computed once for all tests."""
    return loss_and_gradients(build(name, **dict(changes)), batch(kind, length))


def axis_of_all(name: str = "sp") -> Any:
    """Return an axis over all ranks."""
    from windlass.comm.mesh import build_mesh
    from windlass.comm.mesh_shape import MeshShape

    return build_mesh(MeshShape(**{name: torch.distributed.get_world_size()})).axes[name]


def check_close(found: Tensor, wanted: Tensor, name: str, bound: float = BOUND) -> None:
    """Assert that no element differs by more than `bound` times the largest wanted element."""
    error = float((found - wanted).detach().abs().max() / wanted.abs().max().clamp(min=1e-3))
    assert error < bound, f"{name}: {error:.2e} from {wanted.abs().max():.2e}"


def law(way: str, cases: list[tuple[str, dict[str, Any], str, int]]) -> None:
    """Assert that every rank's loss and the mean of the gradients equal those of one process."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    for name, changes, kind, length in cases:
        given, case = batch(kind, length), f"{name} {changes} {kind} {length}"
        wanted_loss, expected = whole_loss_and_gradients(name, tuple(changes.items()), kind, length)
        model = build(name, **changes)
        apply_sequence_parallel(model, axis, **WAYS[way])
        loss, gradients = loss_and_gradients(model, dict(given))
        check_close(loss, wanted_loss, f"{case}: loss")
        check_mean(axis, gradients, expected, case)


def check_mean(
    axis: Any, gradients: dict[str, Tensor], wanted: dict[str, Tensor], case: str, bound: float = BOUND
) -> None:
    """Assert that the mean of all ranks' gradients equals `wanted`."""
    for parameter, gradient in gradients.items():
        mean = gradient.clone()
        torch.distributed.all_reduce(mean)
        check_close(mean / axis.size, wanted[parameter], f"{case}: {parameter}", bound)


WAYS: dict[str, dict[str, Any]] = {
    "ulysses": {"sp_mode": "ulysses"},
    "ring": {"sp_mode": "ring"},
    "ring, unbalanced": {"sp_mode": "ring", "zigzag": False},
    "both": {"sp_mode": "ulysses+ring", "ulysses_degree": 2},
    "both, unbalanced": {"sp_mode": "ulysses+ring", "ulysses_degree": 2, "zigzag": False},
}
BATCHES = ("plain", "packed", "left", "right", "holes", "answers")
ON = [(2, "ulysses"), (2, "ring"), (3, "ulysses"), (3, "ring"), (4, "ring, unbalanced"), (4, "both")]
# Arguments of `share`. For ulysses and for ring, the rows of 2 and of 3 ranks have different halves of the cases.
NUMBERS = {on: number + number // 2 for number, on in enumerate(ON)}
SLOW = [pytest.param(4, way, marks=pytest.mark.slow) for way in ("ulysses", "ring")]


@pytest.mark.parametrize(("world", "way"), [*ON, (4, "both, unbalanced"), *SLOW])
@in_shares
def test_every_kind_of_batch_with_odd_length(world: int, way: str, every: bool) -> None:
    kinds = share(BATCHES, NUMBERS[world, way], 2, every) if (world, way) in ON else BATCHES
    run_ranks(law, world, way, [("llama", {"num_hidden_layers": 1}, kind, 13) for kind in kinds])


@pytest.mark.parametrize(("world", "way"), ON)
@in_shares
def test_head_counts_that_divide_the_ranks_and_that_do_not(world: int, way: str, every: bool) -> None:
    heads = [
        ("llama", {"num_key_value_heads": 4}, "plain", 12),
        ("llama", {"num_key_value_heads": 1}, "packed", 11),
        ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}, "left", 13),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1}, "plain", 9),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, "packed", 9),
    ]
    run_ranks(law, world, way, share(heads, NUMBERS[world, way], 2, every))


@in_shares
@pytest.mark.parametrize(
    ("number", "world", "way"),
    [*((n, *on) for n, on in enumerate(ON)), pytest.param(6, 4, "ulysses", marks=pytest.mark.slow)],
)
def test_models_of_other_architectures(number: int, world: int, way: str, every: bool) -> None:
    models: list[tuple[str, dict[str, Any], str, int]] = [
        ("gpt2", {}, "plain", 13),
        ("gpt2", {"tie_word_embeddings": False}, "packed", 13),
        ("mistral", {}, "plain", 23),
        ("mistral", {}, "packed", 23),
        ("mistral", {}, "left", 23),
        ("gemma2", {}, "plain", 15),
        ("modernbert", {}, "plain", 17),
        ("modernbert", {}, "right", 17),
        *((name, {}, kind, 13) for name in ("opt", "roberta") for kind in ("plain", "left", "holes")),
        ("biogpt", {}, "left", 13),
    ]
    run_ranks(law, world, way, share(models, number, 6, every))


@pytest.mark.parametrize(("world", "way"), [(2, "ulysses"), (3, "ring"), (4, "both")])
def test_router_loss_is_that_of_whole_sequences(world: int, way: str) -> None:
    kinds = [("mixtral", "plain"), ("mixtral", "right"), ("mixtral", "packed"), ("qwen2_moe", "left")]
    run_ranks(law, world, way, [(name, {}, kind, 13) for name, kind in kinds])


@pytest.mark.parametrize(("world", "way"), [(4, "ulysses"), (4, "ring"), (4, "both"), (3, "ring, unbalanced")])
def test_fewer_tokens_than_ranks(world: int, way: str) -> None:
    short = [*((name, {}, "plain", 3) for name in ("llama", "opt", "roberta")), ("gpt2", {}, "plain", 2)]
    run_ranks(law, world, way, short)


# ----------------------------------------------------------------------------------------------------- dropped weights


def whole_with_dropout(name: str, changes: dict[str, Any], given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and gradients of one process that drops the same attention weights as the ranks."""
    from transformers import AttentionInterface

    from windlass.parallel.sequence.attention_dropout import AttentionDropout, combine_seeds
    from windlass.parallel.sequence.attention_tiles import Tile

    model = build(name, **changes)
    numbers = {id(module): number for number, module in enumerate(model.modules())}
    torch.manual_seed(9)
    seed = combine_seeds(int(torch.randint(2**31 - 1, (1,))), 0)

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **more: Any,
    ) -> tuple[Tensor, None]:
        samples, heads, length, features = query.shape
        key, value = (item.repeat_interleave(heads // item.shape[1], dim=1) for item in (key, value))
        scores = query @ key.mT * (features**-0.5 if scaling is None else scaling)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        tile = Tile((0, samples), (0, length), (0, length), "band", 0, 0)
        factors = AttentionDropout(dropout, combine_seeds(seed, numbers[id(module)])).weight_factors(
            heads, tile, query.device
        )
        assert 0.05 < float((factors == 0).float().mean()) < 0.6
        return ((weights * factors) @ value).transpose(1, 2), None

    AttentionInterface.register("dropping", attend)
    model.set_attn_implementation("dropping")
    return loss_and_gradients(model, given)


def dropping(way: str, recompute: bool) -> None:
    """Assert that ranks drop the weights that one process drops, different ones in each layer and forward."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    for name, changes in (
        ("gpt2", {"attn_pdrop": 0.3, "initializer_range": 0.3}),
        ("llama", {"attention_dropout": 0.2, "initializer_range": 0.3}),
    ):
        given = batch("plain", 13)
        wanted_loss, expected = whole_with_dropout(name, changes, dict(given))
        model = build(name, **changes)
        apply_sequence_parallel(model, axis, **WAYS[way])
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(9)
        loss, gradients = loss_and_gradients(model, dict(given))
        check_close(loss, wanted_loss, f"{name}: loss")
        check_mean(axis, gradients, expected, name)
        again = model(**given).loss
        assert float((again - loss).abs()) > 1e-2  # another forward drops other weights
        model.eval()
        check_close(model(**given).loss, build(name, **changes).eval()(**given).loss, f"{name}: in eval mode")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(("world", "way", "recompute"), [(2, "ulysses", True), (3, "ring", False), (4, "both", False)])
def test_attention_dropout_equals_that_of_one_process(world: int, way: str, recompute: bool) -> None:
    run_ranks(dropping, world, way, recompute)


# ------------------------------------------------------------------------------------------------------ bytes, exactly


def bytes_of(way: str, name: str, changes: dict[str, Any], length: int) -> dict[str, int]:
    """Return the bytes that a step moves along sp."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    model = build(name, **changes)
    apply_sequence_parallel(model, axis, **WAYS[way])
    axis.traffic.reset()
    loss_and_gradients(model, batch("plain", length))
    return {name: moved for name, moved in axis.traffic.bytes_moved.items() if moved}


TOKENS, FEATURES, LAYERS, FLOAT, SAMPLES = 24, 32, 2, 4, 2


def loss_bytes(ranks: int) -> int:
    """Return the bytes of all-reduces of two numbers (a sum and a count), one in forward and one in backward."""
    return 2 * (2 * 2 * FLOAT * (ranks - 1) // ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses_traffic_equals_the_formula(ranks: int) -> None:
    """A layer moves 4 N h / P elements for N tokens, h features and P ranks, less the part that a rank keeps."""
    one_way = 4 * SAMPLES * TOKENS * FEATURES // ranks * (ranks - 1) // ranks
    expected = {"all_to_all": 2 * LAYERS * one_way * FLOAT, "all_reduce": loss_bytes(ranks)}
    moved = run_ranks(bytes_of, ranks, "ulysses", "llama", {"num_key_value_heads": 4}, TOKENS)
    assert moved == [expected] * ranks


def test_ulysses_sends_shared_key_heads_once_per_user() -> None:
    """One key head for four query heads is sent to each of four ranks."""
    queries_and_output = 2 * SAMPLES * TOKENS * FEATURES // 4 * 3 // 4
    keys_and_values = 2 * SAMPLES * TOKENS // 4 * 3 * (FEATURES // 4)
    expected = 2 * LAYERS * (queries_and_output + keys_and_values) * FLOAT
    moved = run_ranks(bytes_of, 4, "ulysses", "llama", {"num_key_value_heads": 1}, TOKENS)
    assert [item["all_to_all"] for item in moved] == [expected] * 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_traffic_equals_the_formula(ranks: int) -> None:
    block = 2 * SAMPLES * TOKENS // ranks * (FEATURES // 2)  # two key heads for four query heads
    forward, backward = (ranks - 1) * block, (ranks - 1) * block + ranks * block
    expected = {"pass_on": LAYERS * (forward + backward) * FLOAT, "all_reduce": loss_bytes(ranks)}
    moved = run_ranks(bytes_of, ranks, "ring", "llama", {}, TOKENS)
    assert moved == [expected] * ranks


def test_ring_stops_at_the_end_of_the_window() -> None:
    """With 6 tokens per rank and a window of 5, one previous block is enough. Its gradients return in a second pass."""
    block = 2 * SAMPLES * TOKENS // 4 * (FEATURES // 2)
    moved = run_ranks(bytes_of, 4, "ring, unbalanced", "mistral", {}, TOKENS)
    assert [item["pass_on"] for item in moved] == [LAYERS * (block + block + 2 * block) * FLOAT] * 4


def test_combined_traffic_is_the_sum_of_both() -> None:
    one_way = (2 * FEATURES + 2 * FEATURES // 2) * SAMPLES * TOKENS // 4 // 2  # half the features of 1/4 of the tokens
    block = 2 * SAMPLES * TOKENS // 2 * (FEATURES // 4)  # one key head for half of the tokens
    expected = {
        "all_to_all": 2 * LAYERS * one_way * FLOAT,
        "pass_on": LAYERS * (block + block + 2 * block) * FLOAT,
        "all_reduce": loss_bytes(4),
    }
    assert run_ranks(bytes_of, 4, "both", "llama", {}, TOKENS) == [expected] * 4


# ---------------------------------------------------------------------------------------------- other outputs and calls


def outputs(way: str) -> None:
    """Assert that outputs without labels are complete and ordered, and that a loss of them trains as in one process."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    for name, kind, length in (
        ("llama", "packed", 13),
        ("bert", "right", 13),
        ("llama", "plain", 3),
        ("bert", "plain", 3),
    ):
        given = {key: value for key, value in batch(kind, length).items() if key != "labels"}
        plain, model = build(name), build(name)
        apply_sequence_parallel(model, axis, **WAYS[way])
        expected, actual = plain(**given), model(**given)
        key = "logits" if name == "llama" else "last_hidden_state"
        real = given.get("attention_mask", torch.ones(2, length))[..., None]
        check_close(actual[key] * real, expected[key] * real, f"{name} {key}")
        weights = torch.randn(actual[key].shape, generator=torch.Generator().manual_seed(0)) * real
        (expected[key] * weights).sum().backward()
        (actual[key] * weights).sum().backward()
        found_gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        wanted_gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
        check_mean(axis, found_gradients, wanted_gradients, name)
        tuples = model(**given, return_dict=False), plain(**given, return_dict=False)
        check_close(tuples[0][0] * real, tuples[1][0] * real, "the first of a tuple")


@pytest.mark.parametrize(("world", "way"), [(2, "ulysses"), (4, "both"), (3, "ring")])
def test_outputs_without_labels_are_full_sequences(world: int, way: str) -> None:
    run_ranks(outputs, world, way)


def other_calls() -> None:
    """Compare other calls with one process: other arguments, evaluation, a copy, generation, recomputation."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    given = batch("answers", 13)
    plain, model = build("llama"), build("llama")
    apply_sequence_parallel(model, axis, sp_mode="ring")
    ids, labels = given["input_ids"], given["labels"]
    check_close(model(ids, labels=labels).loss, plain(ids, labels=labels).loss, "positional")
    embedded = plain.get_input_embeddings()(ids).detach()
    check_close(model(inputs_embeds=embedded, labels=labels).loss, plain(ids, labels=labels).loss, "embeddings")
    for items in (50, torch.tensor(50)):
        actual = model(**given, num_items_in_batch=items).loss
        check_close(actual, plain(**given, num_items_in_batch=items).loss, "items")
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    actual = model(ids, labels=ids, shift_labels=shifted).loss
    check_close(actual, plain(ids, labels=labels).loss, "labels that are shifted already")
    model.eval()
    with torch.no_grad():
        check_close(model(**given).loss, plain(**given).loss, "evaluation")
    copied = copy.deepcopy(model)
    actual, gradients = loss_and_gradients(copied, dict(given))
    requested, expected = loss_and_gradients(plain, dict(given))
    check_close(actual, requested, "a copy")
    check_mean(axis, gradients, expected, "a copy")
    assert all(p.grad is None for p in model.parameters())
    model.config.use_cache = plain.config.use_cache = True
    check_close(model(**given).loss, plain(**given).loss, "with a cache in the config")
    plain.eval()
    made = [item.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0) for item in (plain, model)]
    assert torch.equal(*made)
    for reentrant in (False, True):
        again = build("llama")
        apply_sequence_parallel(again, axis, sp_mode="ring")
        again.activation_checkpointing_enable({"use_reentrant": reentrant})
        again.enable_input_require_grads()
        actual, gradients = loss_and_gradients(again, dict(given))
        requested, expected = loss_and_gradients(build("llama"), dict(given))
        check_close(actual, requested, "recomputed")
        check_mean(axis, gradients, expected, "recomputed")


def test_generation_and_other_calls() -> None:
    run_ranks(other_calls, 2)


def interleaved() -> None:
    """Run two forwards of different lengths before their backwards: each backward recomputes its own forward."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    plain, model = build("llama"), build("llama")
    apply_sequence_parallel(model, axis, sp_mode="ring")
    for item in (plain, model):
        item.train()
        item.activation_checkpointing_enable({"use_reentrant": False})
    losses = [
        [entry(**batch(kind, length)).loss for kind, length in (("packed", 13), ("left", 9))]
        for entry in (plain, model)
    ]
    for of_one in losses:
        for loss in of_one:
            loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    check_mean(axis, {n: p.grad for n, p in model.named_parameters()}, expected, "interleaved")


def test_several_forwards_before_their_backwards() -> None:
    run_ranks(interleaved, 2)


def sixteen_bits(way: str) -> None:
    """Assert that in bf16 the loss is within 1 %, and gradients are within 6 %, of fp32 in one process."""
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    exact, expected = loss_and_gradients(build("llama"), batch("packed", 13))
    model = build("llama").bfloat16()
    apply_sequence_parallel(model, axis, **WAYS[way])
    loss, gradients = loss_and_gradients(model, batch("packed", 13))
    check_close(loss, exact, "loss", 1e-2)
    check_mean(axis, {n: g.float() for n, g in gradients.items()}, expected, "bf16", 6e-2)


@pytest.mark.parametrize("way", ["ulysses", "ring"])
def test_bf16_is_near_fp32_of_one_process(way: str) -> None:
    run_ranks(sixteen_bits, 2, way)


def adapters() -> None:
    """Assert that a peft model has the same loss and adapter gradients as in one process."""
    import peft

    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel, sequence_parallel_of

    axis = axis_of_all()
    models = []
    for _ in range(2):
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        base = build("llama")
        torch.manual_seed(3)
        models.append(peft.get_peft_model(base, config))
    plain, model = models
    apply_sequence_parallel(model, axis)
    assert sequence_parallel_of(model) is not None
    wanted_loss, _ = loss_and_gradients(plain, batch("packed", 13))
    loss, _ = loss_and_gradients(model, batch("packed", 13))
    check_close(loss, wanted_loss, "loss")
    expected = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    check_mean(axis, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}, expected, "adapter")


def test_adapters() -> None:
    run_ranks(adapters, 2)


# ------------------------------------------------------------------------------------------------------------- refusals


def refused() -> list[str]:
    """Return the errors for models and batches that can't be sharded."""
    import transformers as hf

    from windlass.base.errors import WindlassError
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    axis = axis_of_all()
    text = []

    def tell(call: Any) -> None:
        try:
            call()
        except WindlassError as error:
            text.append(f"{type(error).__name__}: {error}")
        else:
            text.append("nothing")

    def apply(model: Any, **how: Any) -> Any:
        apply_sequence_parallel(model, axis, **how)
        return model

    tell(lambda: apply(torch.nn.Linear(2, 2)))
    tell(lambda: apply(build("llama"), sp_mode="stripes"))
    tell(lambda: apply(build("llama"), sp_mode="ulysses+ring", ulysses_degree=3))
    tell(lambda: apply(build("llama"), sp_mode="ring", ulysses_degree=2))
    t5 = hf.T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    tell(lambda: apply(hf.T5ForConditionalGeneration(t5)))
    bloom = hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2)
    tell(lambda: apply(hf.BloomForCausalLM(bloom)))
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 40}
    qwen = hf.Qwen3NextConfig(num_hidden_layers=2, **small, layer_types=["linear_attention", "full_attention"])
    tell(lambda: apply(hf.Qwen3NextForCausalLM(qwen)))
    llama = hf.LlamaConfig(num_hidden_layers=1, **small, pad_token_id=0)
    tell(lambda: apply(hf.LlamaForSequenceClassification(llama)))
    tell(lambda: apply(hf.BertForPreTraining(hf.BertConfig(num_hidden_layers=1, **small))))
    tell(lambda: apply(apply(build("llama"))))
    model = build("llama")
    model.loss_function = lambda logits, labels, **_: logits.sum()
    tell(lambda: apply(model))
    model = apply(build("llama"))
    given = batch("plain", 8)
    tell(lambda: model(**given, output_attentions=True))
    tell(lambda: model(**given, logits_to_keep=1))
    tell(lambda: model(**{**given, "attention_mask": torch.ones(2, 1, 8, 8)}))
    tell(lambda: model(**given, speaker=torch.ones(2, 8)))
    tell(lambda: model(**given, cu_seq_lens_q=torch.tensor([0, 8])))
    tell(lambda: model(**{**given, "labels": torch.ones(2, 7, dtype=torch.long)}))
    tell(lambda: model(labels=given["labels"]))
    assert model(**given).loss > 0  # the model still works
    more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}
    bert = apply(hf.BertForMaskedLM(hf.BertConfig(**small, **more)))
    tell(lambda: bert(**given))
    opt = hf.OPTConfig(ffn_dim=16, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=40)
    opt.attention_dropout = 0.0
    model = hf.OPTForCausalLM(opt)
    places = model.model.decoder.embed_positions
    places.__class__ = type("OtherEmbedding", (type(places),), {})
    apply(model)
    tell(lambda: model(**given))
    return text


REFUSALS = [
    "ModelError: Linear is not a transformers model",
    'ConfigError: sp_mode = "stripes" is unknown; write "ulysses"',
    r"ConfigError: ulysses_degree = 3 does not divide the 2 ranks along sp; write one of \[1, 2\]",
    'ConfigError: ulysses_degree = 2 of 2 ranks contradicts sp_mode = "ring"',
    "ModelError: T5ForConditionalGeneration has an encoder and a decoder",
    "ModelError: BloomForCausalLM",
    r"ModelError: Qwen3NextForCausalLM has layers of the types \['linear_attention'\]",
    "ModelError: LlamaForSequenceClassification computes its result from one token of each sequence",
    "ModelError: BertForPreTraining computes its result from one token of each sequence",
    "ModelError: sequences of LlamaForCausalLM are sharded already",
    "ModelError: LlamaForCausalLM has a loss function of its own",
    "ModelError: LlamaForCausalLM got output_attentions",
    "ModelError: LlamaForCausalLM got logits_to_keep",
    r"ModelError: attention_mask is \[2, 1, 8, 8\]",
    r"ModelError: speaker has the shape \[2, 8\] of one value per token",
    "ModelError: the batch describes packed documents by one of cu_seq_lens_q",
    r"ModelError: labels has the shape \[2, 7\], but the sequences have 8 tokens",
    r"ModelError: a batch with the keys \['labels'\] has neither input_ids",
    "ModelError: BertForMaskedLM computes its loss without model.loss_function",
    "ModelError: model.decoder.embed_positions derives positions in an unknown way",
]


def test_unshardable_inputs_are_refused() -> None:
    text = run_ranks(refused, 2)
    assert text[0] == text[1] and len(text[0]) == len(REFUSALS)
    for actual, expected in zip(text[0], REFUSALS, strict=True):
        assert re.match(expected, actual), f"{expected!r} was to be said, and it was {actual!r}"


def outputs_of_heads() -> None:
    """Assert that each token's scores for the ends of an answer are complete, and that no rank pools its own token."""
    import transformers as hf

    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    plain = hf.BertForQuestionAnswering(hf.BertConfig(vocab_size=VOCABULARY, **small, **quiet))
    model = copy.deepcopy(plain)
    apply_sequence_parallel(model, axis_of_all())
    ids = batch("plain", 9)["input_ids"]
    for name in ("start_logits", "end_logits"):
        check_close(model(ids)[name], plain(ids)[name], name)
    pooling = hf.BertModel(plain.config)
    apply_sequence_parallel(pooling, axis_of_all())
    assert pooling(ids).pooler_output is None and pooling(ids).last_hidden_state.shape[1] == 9


def test_outputs_of_heads_are_complete_or_missing() -> None:
    run_ranks(outputs_of_heads, 2)


def test_an_axis_of_one_rank_changes_nothing() -> None:
    from windlass.comm.mesh_axis import single_rank_axis
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel, sequence_parallel_of

    model = build("llama")
    apply_sequence_parallel(model, single_rank_axis("sp"))
    assert sequence_parallel_of(model) is None and model.config._attn_implementation == "sdpa"
