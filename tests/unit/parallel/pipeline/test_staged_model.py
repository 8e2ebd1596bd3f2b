"""Tests that models of transformers in stages compute what the full model computes, with its own forward."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForSequenceClassification

from windlass.base.errors import ConfigError, ModelError
from windlass.parallel.pipeline import layer_timing
from windlass.parallel.pipeline.forward_tracing import trace_forward
from windlass.parallel.pipeline.layer_timing import measure_model_layer_times
from windlass.parallel.pipeline.pipeline_stages import MicroBatchResult
from windlass.parallel.pipeline.staged_model import split_into_stages

_LLAMA: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT: dict[str, Any] = {"vocab_size": 40, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32}
_GPT |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mixtral": {**_LLAMA, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.7},
    "qwen2_moe": {
        **_LLAMA,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
        "mlp_only_layers": [0, 1],  # the first of two stages has no router
        "output_router_logits": True,
        "router_aux_loss_coef": 0.7,
    },
    "gemma2": {**_LLAMA, "head_dim": 4, "attention_dropout": 0.0},
    "gemma3_text": {**_LLAMA, "head_dim": 4},
    "qwen3_moe": {**_LLAMA, "num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2, "head_dim": 4},
    "gemma4_text": {
        **_LLAMA,
        "head_dim": 4,
        "global_head_dim": 4,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cohere": _LLAMA,
    "gpt2": _GPT,
    "gpt_neox": {**_LLAMA, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "opt": {
        "vocab_size": 40,
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 8,
        "dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "bloom": {"vocab_size": 40, "hidden_size": 16, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "falcon": {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4},
    "mamba": {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4},
}


def _config(family: str, **more: Any) -> Any:
    from transformers import AutoConfig

    given = {**_FAMILIES[family], **more}
    if family == "falcon":
        given |= {"bos_token_id": 0, "eos_token_id": 0}
    return AutoConfig.for_model(family, **given)


def _model(family: str, device: str = "cpu", **more: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(_config(family, **more)).train()


def _batch(padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(2, 40, (2, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _in_stages(model: nn.Module, ranks: int, each: int, batch: Any) -> tuple[list[Any], MicroBatchResult]:
    """Run the batch through all stages. Return every rank's part of the model, and the last stage's result."""
    cuts = []
    for rank in range(ranks):
        part = copy.deepcopy(model)
        cuts.append(split_into_stages(part, rank, ranks, virtual_stages=each))
    given: Any = None
    for stage in range(ranks * each):
        result = cuts[stage % ranks]
        given = result.run_stage(result.model, stage, given, batch)
    return cuts, given


def test_batch_may_request_the_router_loss() -> None:
    model = _model("qwen3_moe", router_aux_loss_coef=0.9)
    without = model(**_batch()).loss
    requested = model(**_batch(), output_router_logits=True)
    assert requested.loss > 1.1 * without
    for batch, expected in ((_batch(), without), ({**_batch(), "output_router_logits": True}, requested.loss)):
        _, ended = _in_stages(model, 2, 1, batch)
        assert torch.allclose(ended.loss, expected, rtol=1e-6)
    assert torch.allclose(ended.output.aux_loss, requested.aux_loss, rtol=1e-6)


def test_subclass_has_the_loss_of_its_base() -> None:
    from transformers import MixtralForCausalLM

    class Mine(MixtralForCausalLM):
        pass

    torch.manual_seed(0)
    model = Mine(_config("mixtral"))
    expected = model(**_batch()).loss
    _, ended = _in_stages(model, 2, 1, _batch())
    assert torch.allclose(ended.loss, expected, rtol=1e-6)


def test_router_loss_with_missing_routers_raises() -> None:
    model = _model("mixtral")
    part = split_into_stages(copy.deepcopy(model), 1, 2)
    hidden = torch.randn(2, 7, 16)
    with pytest.raises(ModelError, match="needs the logits of 4 routers, and the last stage received those of 2"):
        part.run_stage(part.model, 1, hidden, _batch())


@pytest.mark.parametrize("family", _FAMILIES)
def test_stages_give_loss_and_gradients_of_the_full_model(family: str) -> None:
    model = _model(family)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for ranks, each, padded in ((2, 1, True), (4, 1, False), (2, 2, True)):
        batch = _batch(padded)
        model.zero_grad()
        expected = model(**batch).loss
        expected.backward()
        cuts, ended = _in_stages(model, ranks, each, batch)
        assert ended.loss is not None and torch.allclose(ended.loss, expected, rtol=1e-6)
        ended.loss.backward()
        results = {name for cut in cuts for name, _ in cut.model.named_parameters(remove_duplicate=False)}
        assert results == names
        sums: dict[str, Tensor] = {}
        for cut in cuts:
            for name, parameter in cut.model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums.get(name, 0) + parameter.grad
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name not in sums), name
            if parameter.grad is not None:
                assert torch.allclose(sums[name], parameter.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("family", _FAMILIES)
def test_meta_model_is_partitioned_equally(family: str) -> None:
    for rank in range(2):
        real, meta = _model(family), _model(family, "meta")
        on_cpu, on_meta = split_into_stages(real, rank, 2), split_into_stages(meta, rank, 2)
        assert [name for name, _ in real.named_parameters()] == [name for name, _ in meta.named_parameters()]
        assert (on_cpu.stage_bounds, on_cpu.trace.output_form) == (on_meta.stage_bounds, on_meta.trace.output_form)
        assert (
            on_cpu.trace.input_modules == on_meta.trace.input_modules
            and on_cpu.trace.output_modules == on_meta.trace.output_modules
        )
        assert on_cpu.shared_parameters == on_meta.shared_parameters
        assert all(p.is_meta for p in meta.parameters())


def test_each_stage_has_only_its_layers_under_their_names() -> None:
    names = []
    for rank in range(4):
        model = _model("llama", tie_word_embeddings=False)
        split_into_stages(model, rank, 4, partition_method="uniform")
        names.append({name.split(".layers.")[-1].split(".")[0] for name, _ in model.named_parameters()})
    assert names == [{"model", "0"}, {"1"}, {"2"}, {"3", "model", "lm_head"}]
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_tied_embedding_is_on_first_and_last_stage() -> None:
    names = {"transformer.wte.weight", "lm_head.weight"}
    for rank in range(3):
        model = _model("gpt2")
        result = split_into_stages(model, rank, 3)
        assert result.shared_parameters == ({} if rank == 1 else {"transformer.wte.weight": (0, 2)})
        assert names & set(model.state_dict()) == (set() if rank == 1 else names)
        assert len({id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in names}) == (
            rank != 1
        )


def test_partition_analysis_does_not_change_the_model() -> None:
    model = _model("gpt2")
    for parameter in model.transformer.wpe.parameters():
        parameter.requires_grad_(False)
    model.transformer.h[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    split_into_stages(model, 0, 2)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and not model.transformer.h[1].training and model.transformer.drop.training
    assert not model.transformer.wpe.weight.requires_grad and model.transformer.wte.weight.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_partition_counts_embedding_and_head() -> None:
    model = _model("llama", vocab_size=4000, tie_word_embeddings=False)
    assert split_into_stages(copy.deepcopy(model), 0, 2).stage_bounds == [0, 2, 4]
    heavy_head = copy.deepcopy(model)
    heavy_head.model.embed_tokens = nn.Embedding(40, 16)
    assert split_into_stages(heavy_head, 0, 2).stage_bounds == [0, 3, 4]
    assert split_into_stages(copy.deepcopy(model), 0, 2, partition_method=[1, 1, 1, 3]).stage_bounds == [0, 3, 4]


def test_layers_with_values_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama")
    state = torch.get_rng_state()
    clock = [0.0]  # a fake clock: real time would depend on the load of the machine
    monkeypatch.setattr(layer_timing, "synchronized_time", lambda device: clock[0])
    for layer, seconds in zip(model.model.layers, (1.0, 1.0, 6.0, 1.0), strict=True):
        layer.register_forward_pre_hook(lambda *_, seconds=seconds: clock.__setitem__(0, clock[0] + seconds))
    hooks = [len(layer._forward_hooks) for layer in model.model.layers]
    result = measure_model_layer_times(model, repeats=3)
    assert result == [1.0, 1.0, 6.0, 1.0]
    assert split_into_stages(model, 0, 2, partition_method=result).stage_bounds == [0, 2, 4]
    assert torch.equal(state, torch.get_rng_state())
    assert [len(layer._forward_hooks) for layer in model.model.layers] == hooks
    with pytest.raises(ConfigError, match='"time" measures layers, and this model is on the meta device'):
        measure_model_layer_times(_model("llama", "meta"))


def test_batches_may_be_tuples_and_losses_omitted() -> None:
    model = _model("llama")
    ids = _batch()["input_ids"]
    cuts = [split_into_stages(copy.deepcopy(model), rank, 2) for rank in range(2)]
    hidden = cuts[0].run_stage(cuts[0].model, 0, None, (ids,))
    ended = cuts[1].run_stage(cuts[1].model, 1, hidden, (ids,), compute_loss=False)
    assert ended.loss is None and torch.allclose(ended.output.logits, model(ids).logits, atol=1e-6)
    for call in (cuts[0].check_batch, lambda batch: cuts[1].run_stage(cuts[1].model, 1, hidden, batch)):
        with pytest.raises(ModelError, match=r"no loss for a micro-batch of \['input_ids'\]; add labels"):
            call({"input_ids": ids})
    cuts[0].check_batch({"input_ids": ids}, compute_loss=False)


class Crossing(nn.Module):
    """Model with a layer stack and a computation that a stage boundary would lose."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.embed, self.bias = what, nn.Embedding(40, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.first = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        if self.what == "between":
            return [x := layer(self.bias(x)) for layer in self.layers][-1]
        if self.what == "changed":
            return [x := 2 * layer(x) for layer in self.layers][-1]
        if self.what == "reversed":
            return [x := layer(x) for layer in reversed(self.layers)][-1]
        if self.what in ("around", "mixed"):
            outputs = [x, *(x := layer(x) for layer in self.layers)]
            added = outputs[0] if self.what == "around" else outputs[2]
            return {"loss": None, "logits": self.bias(outputs[-1] + added)}
        bias = self.bias(x)
        return [x := layer(x, bias=bias) for layer in self.layers][-1]


class Layer(nn.Module):
    """Layer of `Crossing`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("between", "layers (4 of Layer): layer 1 gets other hidden states than layer 0 returned"),
        ("changed", "layers (4 of Layer): layer 1 gets other hidden states than layer 0 returned"),
        ("reversed", "layers (4 of Layer): its layers are called in the order [3, 2, 1, 0]"),
        ("biased", "layer 0 gets bias besides hidden states, which depends on parameters of another stage"),
        ("around", "after its last layer it uses the output of embed, which another stage computes"),
        ("mixed", "after its last layer it uses the hidden states that layer 1 returned, which another stage computes"),
    ],
)
def test_modules_lost_by_partition_are_refused(what: str, said: str) -> None:
    with pytest.raises(ModelError) as results:
        split_into_stages(Crossing(what), 0, 2)
    assert said in str(results.value)
    assert "Crossing can't be split into stages, which need a list of layers" in str(results.value)
    assert "first (2 of Linear): its layers are called in the order []" in str(results.value)


def test_module_before_and_after_the_layers_may_be_used_around_them() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(40, 8), nn.Linear(8, 8)
            self.layers = nn.ModuleList([Layer() for _ in range(4)])

        def forward(self, input_ids: Tensor) -> Tensor:
            x = mixed = self.mix(F.one_hot(input_ids % 8, 8).float())
            for layer in self.layers:
                x = layer(x)
            return self.mix(x + mixed).square().mean()

    torch.manual_seed(0)
    model, ids = Around(), _batch()["input_ids"]
    _, ended = _in_stages(model, 2, 1, {"input_ids": ids})
    torch.testing.assert_close(ended.loss, model(ids))


class Predicting(nn.Module):
    """Model whose loss has a second head, which predicts from hidden states and embeddings of later tokens.

    Args:
        later: the loss calls the embedding again ("called", or "trained" if it does so in train mode only), or uses the
            embeddings that the layers received ("kept").
    """

    def __init__(self, later: str) -> None:
        super().__init__()
        self.later, self.embed, self.head = later, nn.Embedding(40, 8), nn.Linear(8, 40)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.further = nn.Linear(16, 8)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = given = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if labels is None:
            return {"loss": None, "logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.later != "trained" or self.training:
            more = given if self.later == "kept" else self.embed(input_ids)
            further = self.head(self.further(torch.cat([x[:, :-1], more[:, 1:]], -1)))
            loss = loss + F.cross_entropy(further.flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(("ranks", "each"), [(2, 1), (2, 2), (4, 1)])
def test_modules_that_only_the_loss_calls_are_on_the_last_stage(ranks: int, each: int) -> None:
    torch.manual_seed(0)
    model, ids = Predicting("called"), _batch()["input_ids"]
    cuts, ended = _in_stages(model, ranks, each, {"input_ids": ids, "labels": ids})
    expected = model(ids, ids)["loss"]
    torch.testing.assert_close(ended.loss, expected)
    for loss in (expected, ended.loss):
        assert loss is not None
        loss.backward()
    for name, parameter in model.named_parameters():
        held = [dict(cut.model.named_parameters()).get(name) for cut in cuts]
        found = [one.grad for one in held if one is not None and one.grad is not None]
        torch.testing.assert_close(torch.stack(found).sum(0), parameter.grad, msg=name)
    assert cuts[0].trace.uncalled_modules == cuts[-1].trace.uncalled_modules == []


def test_a_loss_that_uses_the_embeddings_of_another_stage_is_refused_and_logits_are_not() -> None:
    ids = _batch()["input_ids"]
    part = split_into_stages(Predicting("kept"), 0, 2)
    said = "can't compute its loss: after its last layer it uses the output of embed, which another stage computes"
    with pytest.raises(ModelError, match=said):
        part.check_batch({"input_ids": ids, "labels": ids})
    part.check_batch({"input_ids": ids, "labels": ids}, compute_loss=False)


def test_an_embedding_of_another_stage_that_only_training_calls_raises() -> None:
    ids = _batch()["input_ids"]
    model = Predicting("trained")
    with pytest.raises(ModelError, match="calls embed after layers of the model, .* this stage lacks the module"):
        _in_stages(model, 2, 1, {"input_ids": ids, "labels": ids})
    _in_stages(model.eval(), 2, 1, {"input_ids": ids, "labels": ids})


@dataclass
class Answer:
    hidden_states: list[Tensor]
    logits: Tensor
    loss: Tensor | None


@pytest.mark.parametrize("form", ["object", "tuple", "dict"])
def test_a_result_may_have_earlier_hidden_states_beside_the_logits(form: str) -> None:
    class Showing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
            self.layers = nn.ModuleList([Layer() for _ in range(4)])

        def forward(self, input_ids: Tensor) -> Any:
            states = [self.embed(input_ids)]
            for layer in self.layers:
                states.append(layer(states[-1]))
            logits = self.head(states[-1])
            if form == "object":
                return Answer(states, logits, None)
            return (states, logits) if form == "tuple" else {"encodings": states[0], "scores": logits}

    assert trace_forward(Showing(), {"input_ids": _batch()["input_ids"]}).num_layers == 4


def test_unpartitionable_models_are_refused_with_a_reason() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    small = T5Config(vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration can't be split .* encoder and a decoder"):
        split_into_stages(T5ForConditionalGeneration(small), 0, 2)
    with pytest.raises(ModelError, match="Linear can't be split into stages, .*: it has none"):
        split_into_stages(nn.Linear(2, 2), 0, 2)
    unheard = _model("llama")
    unheard.config.output_router_logits = True
    with pytest.raises(ModelError, match="output_router_logits requests a loss over the routers of all layers, but"):
        split_into_stages(unheard, 0, 2)
    shares = _model("gemma4_text", num_kv_shared_layers=2)
    with pytest.raises(ModelError, match=r"layers.2.self_attn uses keys and values of an earlier layer"):
        split_into_stages(shares, 0, 2)
    with pytest.raises(ModelError, match="layerdrop skips layers at random"):
        split_into_stages(_model("opt", layerdrop=0.1), 0, 2)
    with pytest.raises(ConfigError, match=r"4 layers \(model.layers\) for 6 stages \(3 ranks, 2 on each\).* at most 2"):
        split_into_stages(_model("llama"), 0, 3, virtual_stages=2)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_trace_leaves_the_type_of_the_problem_to_the_labels(num_labels: int) -> None:
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_labels=num_labels, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    trace_forward(model)
    assert model.config.problem_type is None


def test_access_to_a_module_of_another_stage_is_refused() -> None:
    class Reaching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 8)
            self.layers = nn.ModuleList([Layer() for _ in range(2)])

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return F.linear(x, self.embed.weight)

    with pytest.raises(ModelError, match="without the modules of other stages its forward fails .RuntimeError: "):
        split_into_stages(Reaching(), 1, 2)
