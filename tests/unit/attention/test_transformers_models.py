"""Tests that transformers models with the registered attention equal those with transformers' eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.attention import AttentionBackend, HeadSlice, install_attention, use_backend
from windlass.attention.eager_backend import EagerBackend
from windlass.attention.sdpa_backend import SdpaBackend
from windlass.attention.transformers_dispatch import ATTENTION_NAME, ignore_argument
from windlass.base.errors import ModelError

LENGTH = 13
BOUND = 2e-5


def build(name: str, implementation: str = "eager", **changes: Any) -> Any:
    import transformers as hf

    torch.manual_seed(5)
    small: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "attn_implementation": implementation,
        "initializer_range": 0.3,
    }
    grouped = {**small, "num_key_value_heads": 2, **changes}
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
    if name == "mistral":
        return hf.MistralForCausalLM(hf.MistralConfig(**grouped, sliding_window=5))
    if name == "gemma2":
        soft = {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**grouped, **soft))
    if name == "bert":
        return hf.BertModel(hf.BertConfig(**small))
    if name == "gpt_oss":
        more = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 4}
        return hf.GptOssForCausalLM(hf.GptOssConfig(**grouped, **more))
    assert name == "gpt2"
    sizes = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_implementation=implementation, **changes))


def batch(kind: str) -> dict[str, Tensor]:
    ids = torch.randint(1, 40, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    if kind == "packed":
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(6), torch.arange(7)]).unsqueeze(0)}
    mask = torch.ones_like(ids)
    if kind == "left":
        mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask} if kind == "left" else {"input_ids": ids}


def logits_and_gradients(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Return the logits of the tokens that are not padding, and the gradient of every parameter."""
    logits = model.eval()(**given, use_cache=False)[0]
    kept = logits[given["attention_mask"] != 0] if "attention_mask" in given else logits
    weights = torch.linspace(-1, 1, kept.numel()).view_as(kept)
    (kept * weights).sum().backward()
    return [kept.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def check(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    # Some gradients, e.g. of key biases, are 0 except for rounding. Their errors are relative to `floor`.
    floor = max(float(entry.abs().max()) for entry in wanted) / 100
    for item, other in zip(found, wanted, strict=True):
        assert float((item - other).abs().max() / other.abs().max().clamp(min=floor)) < BOUND


CASES = [
    (backend, name, kind)
    for backend in (None, "sdpa", "eager")
    for name in ("llama", "mistral", "gemma2", "gpt2", "bert")
    for kind in ("plain", "left", "packed")
    # torch's SDPA kernels have no soft cap, which gemma2 needs
    if (name, kind) != ("bert", "packed") and (backend, name) != ("sdpa", "gemma2")
]


@pytest.mark.parametrize(("backend", "name", "kind"), CASES)
def test_every_backend_equals_eager_attention(backend: str | None, name: str, kind: str) -> None:
    from transformers import masking_utils

    if name == "bert" and not hasattr(masking_utils, "create_bidirectional_mask"):
        pytest.skip("BERT of transformers 4.57 computes its attention itself")
    model = build(name)
    install_attention(model)
    assert model.config._attn_implementation == ATTENTION_NAME
    with use_backend(backend):
        result = logits_and_gradients(model, batch(kind))
    check(result, logits_and_gradients(build(name), batch(kind)))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_generation_with_a_cache(backend: str | None, name: str) -> None:
    given = {**batch("left"), "max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    model, plain = build(name).eval(), build(name).eval()
    install_attention(model)
    with use_backend(backend):
        result = model.generate(**given)
    assert torch.equal(result, plain.generate(**given))


class Counting(SdpaBackend):
    """Backend that counts its calls."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def attend(self, *arguments: Any, **named: Any) -> Tensor:
        self.calls += 1
        return super().attend(*arguments, **named)


def test_calls_of_one_model_use_the_backend_of_their_context() -> None:
    model, first, second = build("llama"), Counting(), Counting()
    install_attention(model)
    given = batch("plain")
    expected = model(**given).logits
    with use_backend(first):
        model(**given)
        with use_backend(second):
            model(**given)
        with use_backend(None):
            assert torch.equal(model(**given).logits, expected)
        model(**given)
    model(**given)
    assert (first.calls, second.calls) == (4, 2)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_layer_uses_the_backend_of_its_forward(reentrant: bool) -> None:
    model, backend = build("llama").train(), Counting()
    install_attention(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with use_backend(backend):
        loss = model(**batch("left"), use_cache=False).logits.square().mean()
    assert backend.calls == 2
    loss.backward()
    assert backend.calls == 4


class Refusing(AttentionBackend):
    """Backend that refuses every model."""

    name = "refusing"

    def check(self, model: Any) -> None:
        raise ModelError(f"{type(model).__name__} is refused")

    def make_mask(self, mask: Any) -> Any:
        raise ModelError("no mask")

    def attend(self, *arguments: Any, heads: HeadSlice, **named: Any) -> Tensor:
        raise AssertionError("not reached")


def test_unsupported_calls_are_refused_by_the_backend() -> None:
    model = build("llama", "sdpa")
    with pytest.raises(ModelError, match="LlamaForCausalLM is refused"):
        install_attention(model, EagerBackend(), Refusing())
    assert model.config._attn_implementation == "sdpa"
    install_attention(model, EagerBackend())
    with pytest.raises(ModelError, match="no mask"), use_backend(Refusing()):
        model(**batch("plain"))
    assert model(**batch("plain")).logits.isfinite().all()
    with pytest.raises(ModelError, match="Linear is not a transformers model"):
        install_attention(torch.nn.Linear(1, 1))
    import transformers as hf

    bloom = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match="BloomForCausalLM does not call its attention through"):
        install_attention(bloom)


def test_unsupported_layer_arguments_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = build("gemma2")
    install_attention(gemma)
    with pytest.raises(ModelError, match='Gemma2Attention passes softcap .* "sdpa" does not'), use_backend("sdpa"):
        gemma(**batch("plain"))
    sinks = build("gpt_oss")
    install_attention(sinks)
    with pytest.raises(ModelError, match='GptOssAttention passes s_aux .* "sdpa" does not'), use_backend("sdpa"):
        sinks(**batch("plain"))
    llama = build("llama")
    install_attention(llama)
    with use_backend("eager"):
        with pytest.raises(ModelError, match='LlamaAttention passes mood to attention.*ignore_argument."mood"'):
            llama(**batch("plain"), mood=1)
        ignored = set(__import__("windlass.attention.transformers_dispatch", fromlist=["x"])._IGNORED_ARGUMENTS)
        monkeypatch.setattr("windlass.attention.transformers_dispatch._IGNORED_ARGUMENTS", ignored)
        ignore_argument("mood")
        llama(**batch("plain"), mood=1)


@torch.no_grad()
def test_sinks_are_kept_with_and_without_a_backend() -> None:
    """transformers' sdpa function would silently ignore `s_aux`."""
    model = build("gpt_oss", "eager").eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.copy_(torch.randn_like(layer.self_attn.sinks) * 3)
    given = batch("plain")
    expected = model(**given).logits
    install_attention(model)
    torch.testing.assert_close(model(**given).logits, expected)
    with use_backend("eager"):
        torch.testing.assert_close(model(**given).logits, expected)


@pytest.mark.slow  # imports torch._dynamo
@torch.no_grad()
def test_compiled_models_follow_the_context() -> None:
    """Compiled code looks up the backend at run time, not while tracing."""
    model, backend = build("llama").eval(), Counting()
    install_attention(model)
    compiled: Any = torch.compile(model, backend="eager")
    given = batch("left")
    expected = model(**given, use_cache=False).logits[given["attention_mask"] != 0]
    for _ in range(2):
        for context, calls in ((None, 0), (backend, 2)):
            backend.calls = 0
            with use_backend(context):
                actual = compiled(**given, use_cache=False).logits[given["attention_mask"] != 0]
            torch.testing.assert_close(actual, expected)
            assert backend.calls == calls
