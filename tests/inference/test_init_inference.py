"""Law: `init_inference(model).generate` returns what transformers' `generate` returns, for every form of arguments."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GenerationConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

import windlass
from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import round_layers
from windlass.base.errors import ConfigError, ModelError, RequestError
from windlass.compat.inference_engine import default_inference_config, init_inference
from windlass.compat.on_device import OnDevice
from windlass.config.inference_section import InitInference

SMALL = {"kv_cache_tokens": 512, "max_tokens_per_step": 64, "max_sequences": 16}


def small_model() -> Any:
    return build("llama", max_position_embeddings=96).eval()


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Return three prompts, padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (3, 7), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 4, 2)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return ids, mask


def test_weights_that_a_script_loads_are_followed() -> None:
    """The prefix cache still has keys and values of the former weights, which must not be used."""
    first, second = small_model(), build("llama", seed=1, max_position_embeddings=96).eval()
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(0))
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "pad_token_id": 0}
    engine = windlass.init_inference(copy.deepcopy(first), **SMALL)
    assert torch.equal(engine.generate(ids, **settings), first.generate(ids, **settings))
    engine.module.load_state_dict(second.state_dict())
    assert torch.equal(engine.generate(ids, **settings), second.generate(ids, **settings))
    for mine, value in zip(engine.module.parameters(), first.parameters(), strict=True):
        mine.data.copy_(value.data)  # leaves the parameter's version as it is
    assert torch.equal(engine.generate(ids, **settings), first.generate(ids, **settings))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("change", [5, -4])
def test_the_vocabulary_may_be_resized_between_calls(name: str, change: int) -> None:
    model = build(name, **{"n_positions" if name == "gpt2" else "max_position_embeddings": 96}).eval()
    engine = windlass.init_inference(copy.deepcopy(model), **SMALL)
    ids, mask = padded()
    ids = ids.clamp(max=VOCABULARY - 5)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0}
    assert torch.equal(engine.generate(ids, **settings), model.generate(ids, **settings))
    model.resize_token_embeddings(VOCABULARY + change)
    engine.module.resize_token_embeddings(VOCABULARY + change)
    engine.module.load_state_dict(model.state_dict())
    ids[:, -1] = VOCABULARY + change - 1
    assert torch.equal(engine.generate(ids, **settings), model.generate(ids, **settings))
    with pytest.raises(RequestError, match="is not in the vocabulary of"):
        engine.generate(ids + 1, **settings)


def test_hooks_may_free_the_memory_of_weights_between_calls() -> None:
    model = small_model()
    engine = windlass.init_inference(copy.deepcopy(model), **SMALL)
    weight: Any = engine.module.get_input_embeddings().weight  # type: ignore[operator]
    kept = weight.data.clone()

    def load(*_: Any) -> None:
        weight.data.untyped_storage().resize_(kept.nbytes)
        weight.data.copy_(kept)

    def free(*_: Any) -> None:
        weight.data.untyped_storage().resize_(0)

    engine.module.register_forward_pre_hook(load)
    engine.module.register_forward_hook(free)
    free()
    ids, mask = padded()
    settings = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0}
    for _ in range(2):
        assert torch.equal(engine.generate(ids, **settings), model.generate(ids, **settings))


def test_the_dtype_may_change_between_calls() -> None:
    model = small_model()
    engine = windlass.init_inference(copy.deepcopy(model), **SMALL)
    ids, mask = padded()
    settings = {"attention_mask": mask, "max_new_tokens": 6, "pad_token_id": 0}
    for dtype in (torch.float32, torch.float16, torch.float32):
        assert torch.equal(engine.to(dtype).generate(ids, **settings), model.to(dtype).generate(ids, **settings))


def test_the_engine_is_built_once_a_call_needs_it() -> None:
    """Beam search runs in the module's own `generate`, and needs the memory that a KV cache would take."""
    engine = windlass.init_inference(small_model(), **SMALL)
    ids, mask = padded()
    engine.generate(ids, attention_mask=mask, max_new_tokens=2, num_beams=2)
    assert engine._llm is None
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)
    assert engine._llm is not None


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_conv1d_layers_are_packed_with_and_without_native_kernels(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_KERNELS", kernels)
    model = build("gpt2", n_positions=96).eval()
    engine = windlass.init_inference(copy.deepcopy(model), weights="int8", **SMALL)
    kept = [one for one in engine.module.modules() if type(one) in (nn.Linear, Conv1D) and not one.weight.is_meta]
    assert not kept
    round_layers(model, "int8")
    ids, mask = padded()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=6), expected)


@pytest.mark.parametrize("kind", [BertModel, BertForSequenceClassification, T5ForConditionalGeneration])
def test_models_without_logits_of_tokens_are_packed(kind: Any) -> None:
    sizes = {"vocab_size": 128, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96}
    config: Any = BertConfig(num_hidden_layers=2, **sizes)
    if kind is T5ForConditionalGeneration:
        config = T5Config(vocab_size=128, d_model=64, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = kind(config).eval()
    ids = torch.randint(3, 128, (2, 9))
    more = {"decoder_input_ids": ids} if kind is T5ForConditionalGeneration else {}
    engine = init_inference(copy.deepcopy(model), dtype=torch.int8)
    assert all(type(one) is not nn.Linear for one in engine.module.modules())
    found, expected = engine(ids, **more)[0], model(ids, **more)[0]
    assert (found - expected).abs().max() < 0.1 * expected.std()
    round_layers(model, "int8")
    torch.testing.assert_close(found, model(ids, **more)[0], rtol=1e-3, atol=1e-4)
    if kind is T5ForConditionalGeneration:
        assert torch.equal(engine.generate(ids, max_new_tokens=5), model.generate(ids, max_new_tokens=5))


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_weights_of_a_directory_may_stay_in_a_file(tier: str, tmp_path: Path) -> None:
    model = small_model()
    model.save_pretrained(tmp_path)
    ids, mask = padded()
    engine = windlass.init_inference(str(tmp_path), weights_tier=tier, **SMALL)
    assert any(one.is_meta for one in engine.module.parameters())
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=5), expected)
    torch.testing.assert_close(engine(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
    with pytest.raises(ConfigError, match="cannot become torch.float64"):
        engine.double()
    engine.close()
    with pytest.raises(ConfigError, match="the weight file is closed"):
        engine.generate(ids, attention_mask=mask, max_new_tokens=5)
    with pytest.raises(ConfigError, match="with the model's directory"):
        windlass.init_inference(model, weights_tier=tier)


def test_float16_is_widened_on_the_cpu() -> None:
    engine = windlass.init_inference(small_model(), dtype=torch.float16, **SMALL)
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 9, "eos_token_id": -1},
        {"max_new_tokens": 9},
        {"max_length": 15},
        {"max_new_tokens": 9, "repetition_penalty": 1.7},
        {"max_new_tokens": 12, "min_new_tokens": 6},
        {"max_new_tokens": 9, "eos_token_id": [5, 6, 7, 8, 9, 10], "pad_token_id": 1},
        {"max_new_tokens": 6, "num_beams": 3},
        {"max_new_tokens": 9, "do_sample": True, "top_k": 1},
        {},
        {"generation_config": GenerationConfig(max_new_tokens=30)},
    ],
)
def test_tokens_and_padding_are_those_of_transformers(settings: dict[str, Any]) -> None:
    model = small_model()
    ids, mask = padded()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using the model-agnostic default `max_length`")
        expected = model.generate(ids, attention_mask=mask, **settings)
    engine = windlass.init_inference(copy.deepcopy(model), **SMALL)
    assert torch.equal(engine.generate(ids, attention_mask=mask, **settings), expected)
    assert torch.equal(engine.generate(input_ids=ids, attention_mask=mask, **settings), expected)


@pytest.mark.parametrize("ends", [-1, None, VOCABULARY - 1])
def test_the_models_own_end_may_be_drawn_where_another_ends_the_answer(ends: int | None) -> None:
    """The model's own end token may also be one of the first `min_new_tokens` tokens."""
    model = small_model()
    ids, mask = padded()
    settings = {"max_new_tokens": 9, "min_new_tokens": 6, "eos_token_id": ends, "pad_token_id": 0}
    free = model.generate(ids, attention_mask=mask, **settings)
    model.generation_config.eos_token_id = int(free[0, ids.shape[1] + 1])
    engine = windlass.init_inference(copy.deepcopy(model), **SMALL)
    assert torch.equal(model.generate(ids, attention_mask=mask, **settings), free)
    assert torch.equal(engine.generate(ids, attention_mask=mask, **settings), free)


def test_padding_is_recognized_without_a_mask() -> None:
    model = small_model()
    ids, _ = padded()
    engine = windlass.init_inference(copy.deepcopy(model), **SMALL)
    for settings in ({"pad_token_id": 0}, {"pad_token_id": 0, "eos_token_id": [0, 9]}, {"pad_token_id": None}):
        settings = {"max_new_tokens": 9, **settings}
        assert torch.equal(engine.generate(ids, **settings), model.generate(ids, **settings))


def test_a_prompt_of_more_than_20_tokens_gets_20_new_ones_by_default() -> None:
    model = small_model()
    ids = torch.arange(3, 33)[None]
    expected = model.generate(ids, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    found = windlass.init_inference(copy.deepcopy(model), **SMALL).generate(ids, eos_token_id=None, pad_token_id=0)
    assert found.shape == (1, 50) and torch.equal(found, expected)


def test_logits_that_are_no_numbers_are_an_error() -> None:
    model = small_model()
    engine = windlass.init_inference(model, **SMALL, check_at_load=False)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="highest logit of the model is nan"):
        engine.generate(torch.ones(1, 4, dtype=torch.long) * 4, max_new_tokens=5)


def test_forward_and_attributes_are_those_of_the_module() -> None:
    model = small_model()
    ids, mask = padded()
    engine = windlass.init_inference(model, **SMALL)
    before = model(ids, attention_mask=mask).logits
    engine.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert engine.module is model
    assert engine.config is model.config
    assert torch.equal(engine(ids, attention_mask=mask).logits, before.detach())


def test_samples_follow_the_seed_of_torch_and_the_number_of_sequences() -> None:
    ids, mask = padded()
    engine = windlass.init_inference(small_model(), **SMALL)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(
            engine.generate(
                ids, attention_mask=mask, do_sample=True, max_new_tokens=8, num_return_sequences=2, eos_token_id=None
            )
        )
    assert found[0].shape == (6, 15)
    assert torch.equal(found[0][:, :7], ids.repeat_interleave(2, 0))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_more_answers_than_sequences_are_generated_in_parts() -> None:
    model, (ids, mask) = small_model(), padded()
    engine = windlass.init_inference(model, **{**SMALL, "max_sequences": 2})
    settings = {"attention_mask": mask, "do_sample": True, "max_new_tokens": 8, "eos_token_id": None}
    torch.manual_seed(0)
    found = engine.generate(ids, num_return_sequences=5, **settings)
    assert found.shape == (15, 15) and torch.equal(found[:, :7], ids.repeat_interleave(5, 0))
    assert all(len(one.unique(dim=0)) == 5 for one in found.split(5))
    with pytest.raises(RequestError, match="greedy"):
        engine.generate(ids, num_return_sequences=5, top_k=1, **settings)


def test_draws_follow_the_distribution_of_top_k_and_temperature() -> None:
    model = small_model()
    ids = torch.tensor([[5, 7, 9]])
    engine = windlass.init_inference(model, **SMALL)
    torch.manual_seed(0)
    count = 600
    drawn = torch.cat(
        [
            engine.generate(ids, do_sample=True, top_k=3, temperature=0.7, max_new_tokens=1, num_return_sequences=15)[
                :, -1
            ]
            for _ in range(count // 15)
        ]
    )
    top = (model(ids).logits[0, -1] / 0.7).topk(3)
    expected = top.values.softmax(0).double() * count
    observed = torch.stack([(drawn == token).sum() for token in top.indices]).double()
    assert observed.sum() == count
    assert ((observed - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees of freedom: p = 0.1 %


def test_draws_of_top_p_and_min_p_are_those_of_transformers() -> None:
    """The mass of `top_p` includes the tokens that `min_p` excludes: here those after the second one."""
    model = small_model()
    ids = torch.tensor([[5, 7, 9]])
    found = model(ids).logits[0, -1].detach().softmax(-1).sort(descending=True)
    first, second, third = found.values[:3].tolist()
    top_p, min_p = first + second / 2, (second + third) / 2 / first
    assert top_p * (first + second) < first  # the first would be enough for the mass of the two
    settings = {"do_sample": True, "max_new_tokens": 1, "top_k": 0, "top_p": top_p, "min_p": min_p}
    engine = windlass.init_inference(model, **SMALL)
    for generate in (engine.generate, model.generate):
        torch.manual_seed(0)
        drawn = generate(ids, num_return_sequences=60, attention_mask=torch.ones_like(ids), **settings)[:, -1]
        assert set(drawn.tolist()) == set(found.indices[:2].tolist())


def test_a_top_k_of_none_draws_from_all_tokens() -> None:
    """Without the argument, transformers draws from 50 tokens."""
    model: Any = build("llama", vocab_size=97, max_position_embeddings=96).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)  # all tokens are about equally likely
    ids = torch.tensor([[5, 7, 9]])
    settings = {"do_sample": True, "max_new_tokens": 1, "num_return_sequences": 300, "pad_token_id": 0}
    engine = windlass.init_inference(model, **SMALL)
    for generate in (engine.generate, model.generate):
        torch.manual_seed(0)
        assert len(generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, -1].unique()) <= 50
        drawn = generate(ids, attention_mask=torch.ones_like(ids), top_k=None, eos_token_id=None, **settings)[:, -1]
        assert len(drawn.unique()) > 60


def test_the_generation_config_may_be_the_second_argument() -> None:
    model = small_model()
    ids, mask = padded()
    config = GenerationConfig(max_new_tokens=5, pad_token_id=0, eos_token_id=3)
    engine = windlass.init_inference(model, **SMALL)
    found = engine.generate(ids, config, attention_mask=mask)
    assert torch.equal(found, model.generate(ids, config, attention_mask=mask))


def test_end_tokens_may_be_a_tensor() -> None:
    model = small_model()
    ids, mask = padded()
    ends = torch.tensor([3, 8, 20, 30, 40, 50])
    engine = windlass.init_inference(model, **SMALL)
    settings = {"attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
    found = engine.generate(ids, eos_token_id=ends, **settings)
    assert torch.equal(found, model.generate(ids, eos_token_id=ends, **settings))


def test_a_model_that_generates_nothing_is_called() -> None:
    layer = nn.Linear(4, 3)
    engine = windlass.init_inference(layer)
    x = torch.randn(2, 4)
    assert torch.equal(engine(x), layer(x))
    with pytest.raises(ConfigError, match="not a language model"):
        engine.generate(torch.zeros(1, 1, dtype=torch.long))


def test_settings_that_only_the_model_itself_could_serve_are_refused_where_it_generates_nothing() -> None:
    engine = windlass.init_inference(small_model(), **SMALL)
    engine.module.generate = None
    ids = torch.tensor([[3, 4]])
    assert engine.generate(ids, max_new_tokens=2).shape == (1, 4)
    with pytest.raises(ConfigError, match=r"lacks these settings of generate \(max_new_tokens, num_beams\)"):
        engine.generate(ids, max_new_tokens=2, num_beams=3)
    for wrong, given in ((None, "None"), (ids[0], r"of shape \(2,\)"), (ids[:0], r"of shape \(0, 2\)")):
        with pytest.raises(RequestError, match=f"input_ids is {given}; give token ids of shape") as raised:
            engine.generate(wrong)
        assert raised.value.parameter == "input_ids"
    engine.module.generation_config.num_beams = 3
    with pytest.raises(ConfigError, match=r"lacks these settings of generate \(those of the model's generation_conf"):
        engine.generate(ids)


def test_an_encoder_decoder_generates_by_itself() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=4)
    engine = init_inference(copy.deepcopy(model), dtype=torch.float, replace_with_kernel_inject=False)
    assert torch.equal(engine.generate(ids, max_new_tokens=4), expected)
    engine.module.generate = None
    with pytest.raises(ConfigError, match="is an encoder-decoder without a generate of its own"):
        engine.generate(ids)


def test_prompts_without_tokens_and_without_room_are_errors() -> None:
    engine = windlass.init_inference(small_model(), **SMALL)
    ids, mask = padded()
    with pytest.raises(RequestError, match="no token whose attention_mask is 1"):
        engine.generate(ids, attention_mask=mask * 0, max_new_tokens=2)
    with pytest.raises(RequestError, match="max_length is .* leaves no room"):
        engine.generate(ids, attention_mask=mask, max_length=7)


@pytest.mark.parametrize("limit", [{"max_model_len": 16}, {"kv_cache_tokens": 16}])
def test_an_answer_that_exceeds_the_window_is_refused(limit: dict[str, int]) -> None:
    engine = windlass.init_inference(small_model(), **{**SMALL, **limit})
    ids = torch.full((1, 10), 4)
    for length in ({"max_new_tokens": 7}, {"max_length": 17}):
        (name, value), *_ = length.items()
        with pytest.raises(RequestError, match=f"{name} is {value}, and a prompt has 10 tokens; the engine takes 16"):
            engine.generate(ids, **length)
    assert engine.generate(ids, max_new_tokens=6).shape == (1, 16)
    assert engine.generate(ids).shape == (1, 16)  # cut at the limit, as in transformers
    with pytest.raises(RequestError, match="takes 16 together"):
        engine.generate(torch.full((1, 16), 4))


# DeepSpeed's keys


@pytest.mark.parametrize(
    "given",
    [
        {"replace_with_kernel_inject": True, "dtype": torch.float32, "mp_size": 1},
        {"config": {"tensor_parallel": {"tp_size": 1}, "dtype": "fp32", "max_out_tokens": 64}},
        {"dtype": torch.half, "tensor_parallel": 1, "enable_cuda_graph": True, "injection_policy": {nn.Linear: ("x",)}},
        {"config": InitInference(dtype=torch.float32, replace_with_kernel_inject=True)},
    ],
)
def test_deepspeed_names_generate_alike(given: dict[str, Any]) -> None:
    model = small_model()
    ids, mask = padded()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=5)
    engine = init_inference(copy.deepcopy(model), **given)
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=5), expected)
    engine.destroy()


def test_times_of_calls_are_recorded() -> None:
    engine = init_inference(small_model(), dtype="fp32")
    with pytest.raises(ConfigError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine(torch.ones(1, 3, dtype=torch.long))
    engine.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    times = engine.model_times()
    assert len(times) == 2 and min(times) > 0
    assert engine.model_times() == []


def test_max_out_tokens_bounds_prompt_and_answer() -> None:
    ids, mask = padded()
    engine = init_inference(small_model(), dtype="fp32", max_out_tokens=8)
    with pytest.raises(RequestError, match="takes 8 together with the answer"):
        engine.generate(torch.ones(1, 8, dtype=torch.long) * 4, max_new_tokens=5)
    assert engine.generate(ids, attention_mask=mask, max_new_tokens=1).shape == (3, 8)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"checkpoint_config": {"base_dir": "x"}}, "at the top level"),
        ({"save_mp_checkpoint_path": "x"}, "save_pretrained"),
        ({"mpu": object()}, "neighbouring ranks"),
        ({"zero": {"stage": 3}}, "windlass.initialize"),
        ({"quant": {"weight": {"num_bits": 4}}}, "weights='int8'"),
        ({"training_mp_size": 2}, "windlass export"),
        ({"dtype": "torch.complex64"}, "write one of .*bfloat16"),
        ({"tensor_paralel": 1}, "tensor_paralel"),
        ({"config": {"dtype": "fp32"}, "dtype": "bf16"}, "give each key once"),
    ],
)
def test_refused_keys_say_why(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        init_inference(small_model(), **given)


class TiedNet(nn.Module):
    """User-defined module with a tied matrix and a buffer, and without `generate`."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


@pytest.mark.parametrize("form", ["json", "dict", "directory", "bin"])
def test_a_checkpoint_gives_a_model_its_weights(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is on the meta device, or has other weights. BLOOM's first files lack the prefix of tensor names."""
    monkeypatch.setattr(logging.getLogger("windlass"), "propagate", True)
    name = "bloom" if form == "bin" else "mixtral"  # experts are joined from several tensors of the files
    model = build(name).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    given: dict[str, Any] = {"checkpoint": {"type": "ds_model", "checkpoints": files, "version": 1.0}}
    given["base_dir"] = str(tmp_path)
    if form == "json":
        given["checkpoint"]["base_dir"] = given.pop("base_dir")
        (tmp_path / "list.json").write_text(json.dumps(given["checkpoint"]))
        given["checkpoint"] = str(tmp_path / "list.json")
    elif form == "directory":
        given = {"checkpoint": str(tmp_path)}
    elif form == "bin":
        weights = {key.removeprefix("transformer."): one.half() for key, one in model.state_dict().items()}
        torch.save({"module": {**weights, "more": torch.zeros(1)}}, tmp_path / "one.bin")
        given["checkpoint"] = {"type": "BLOOM", "checkpoints": ["one.bin"], "version": 1.0}
        model = model.half().float()
    if form == "dict":
        empty = build(name, seed=1)
    else:
        with OnDevice(torch.float16, device="meta"):
            empty = type(model)(copy.deepcopy(model.config))
    engine = init_inference(empty, dtype=torch.float16, replace_with_kernel_inject=True, **given)
    assert engine.module is empty
    ids, mask = padded()
    expected = model(ids, attention_mask=mask).logits.detach()
    assert torch.equal(engine(ids, attention_mask=mask).logits, expected)
    assert ("tensors of the checkpoint that the model lacks are ignored: ['more']" in caplog.text) == (form == "bin")


def test_a_checkpoint_gives_any_module_its_weights(tmp_path: Path) -> None:
    model, x = TiedNet(), torch.randn(2, 4)
    weights = model.state_dict()
    del weights["second.weight"]
    torch.save(weights, tmp_path / "one.pt", _use_new_zipfile_serialization=False)
    with OnDevice(torch.float32, device="meta"):
        empty, wrong = TiedNet(), TiedNet(persistent=False)
    for target in (empty, TiedNet()):
        engine = init_inference(target, dtype="fp32", checkpoint=str(tmp_path / "one.pt"))
        assert torch.equal(engine(x), model(x)) and target.second.weight is target.first.weight
    with pytest.raises(ModelError, match="buffer scale of TiedNet is on the meta device"):
        init_inference(wrong, dtype="fp32", checkpoint=str(tmp_path / "one.pt"))
    with OnDevice(torch.float32, device="meta"), pytest.raises(ModelError, match=r"TiedNet is on the meta device.*ch"):
        init_inference(TiedNet(), dtype="fp32")


@pytest.mark.parametrize(
    ("description", "error", "reason"),
    [
        ({"checkpoints": ["half.pt"]}, ModelError, r"lacks 1 tensors \(scale\) of TiedNet"),
        ({"checkpoints": ["half.pt", "wide.pt"]}, ModelError, r"other shapes for 1 tensors \(scale\)"),
        ({"checkpoints": ["half.pt", "other.pt"]}, ConfigError, "have different values of first.weight"),
        ({"checkpoints": ["none.pt"]}, ModelError, "no file .*none.pt, which checkpoint lists"),
        ({"checkpoints": ["code.pt"]}, ModelError, "code.pt contains objects that are not tensors: .*state_dict"),
        ({"checkpoints": ["list.pt"]}, ModelError, "list.pt holds .*, not tensors by name"),
        ({"checkpoints": ["cut.pt"]}, ModelError, "cut.pt cannot be read"),
        ({"checkpoints": ["cut.safetensors"]}, ModelError, "cut.safetensors cannot be read"),
        ({"checkpoints": {"tp": ["half.pt"]}}, ConfigError, "lists parts of tensors"),
        ({"checkpoints": ["half.pt"], "parallelization": "tp"}, ConfigError, "lists parts of tensors"),
        ({"checkpoints": ["half.pt"], "type": "gpt"}, ConfigError, "types: BLOOM, ds_model, Megatron"),
        ({"checkpoints": []}, ConfigError, 'write {"type"'),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    description: dict[str, Any], error: type[Exception], reason: str, tmp_path: Path
) -> None:
    torch.save({"first.weight": torch.eye(4)}, tmp_path / "half.pt")
    torch.save({"first.weight": torch.ones(4, 4)}, tmp_path / "other.pt")
    torch.save({"scale": torch.ones(5)}, tmp_path / "wide.pt")
    torch.save({"scale": Path("/")}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "half.pt").read_bytes()[:200])
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(error, match=reason):
        init_inference(
            TiedNet(), checkpoint={"type": "Megatron", "version": 1.0, **description}, base_dir=str(tmp_path)
        )


def test_the_default_configuration_is_accepted() -> None:
    model = small_model()
    ids, mask = padded()
    engine = init_inference(copy.deepcopy(model), default_inference_config())
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=4), expected)


def test_packed_weights_stay_where_they_are() -> None:
    """Scripts call `to` on the engine before each call; packed layers keep their device and dtype."""
    ids, mask = padded()
    engine = windlass.init_inference(small_model(), weights="int8", **SMALL)
    expected = engine.generate(ids, attention_mask=mask, max_new_tokens=5)
    assert engine.to("cpu").float().to(torch.device("cpu")) is engine
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=5), expected)
    with pytest.raises(ConfigError, match=r"packed in int8 for cpu, and cannot become torch.bfloat16"):
        engine.bfloat16()
