"""Law: a recorded step computes what the modules compute, with the same bits for any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import assert_greedy, make_prompts
from windlass.base.errors import ConfigError
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.packed_model import load_packed_model
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm import LLM
from windlass.inference.packed_modules import join_biases
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.inference_path import get_inference_path

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
RECORDED = {
    "llama": {"rms_norm", "rotary", "gate"},
    "qwen3": {"rms_norm", "rotary", "gate"},
    "phi3": {"rms_norm"},
    "gemma2": {"rms_norm", "rotary", "gate"},
    "gemma3": {"rms_norm", "rotary", "gate"},
    "olmo2": {"rms_norm", "rotary", "gate"},
    "gpt2": set(),
    "opt": set(),
    "gpt_neox": set(),
    "glm": set(),
    "cohere": set(),
}
EXPERTS = ("mixtral", "qwen2_moe", "gpt_oss")  # the batch determines how many rows each expert computes


def saved(name: str, directory: Path) -> Any:
    sizes = {"n_positions": 96} if name == "gpt2" else {"max_position_embeddings": 96}
    wide = {"hidden_size": 64, "intermediate_size": 96} if name != "gpt2" else {"n_embd": 48}
    wide = {} if name in ("gemma2", "gemma3", "opt", "qwen3", *EXPERTS) else wide
    model = build(name, **sizes, **wide).eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("name", [*RECORDED, *EXPERTS])
def test_recorded_steps_generate_what_the_plain_model_does(name: str, tmp_path: Path) -> None:
    if get_inference_path().module is None:
        pytest.fail("the native kernels of inference are missing")
    model = saved(name, tmp_path)
    found = []
    for budget, sequences in ((64, 8), (7, 3)):
        with LLM(tmp_path, max_tokens_per_step=budget, max_sequences=sequences, skip_tokenizer_init=True) as llm:
            program = getattr(llm.engine.runner, "program", None)
            assert program is not None or name in EXPERTS
            if name in RECORDED:
                assert RECORDED[name] <= set(program.operators), f"not fused: {program.operators}"
            if name in ("llama", "qwen3", "gemma3"):
                assert program.num_calls < 14, program.operators  # a layer takes few calls: see [Note: native runs]
            outputs = llm.generate(make_prompts(9, VOCABULARY, 30), GREEDY)
        assert_greedy(model, outputs)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    if name in RECORDED:
        assert found[0] == found[1]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("form", ["int4_g32", "int8"])
def test_packed_experts_are_recorded_as_one_operator(name: str, form: str, tmp_path: Path) -> None:
    build(name, hidden_size=64, intermediate_size=96, tie_word_embeddings=False).eval().save_pretrained(tmp_path / "a")
    write_packed_directory(tmp_path / "a", tmp_path / "packed", form, head=True)
    found = []
    for budget, sequences in ((64, 8), (7, 3)):
        options = {"max_tokens_per_step": budget, "max_sequences": sequences, "skip_tokenizer_init": True}
        with LLM(tmp_path / "packed", activations="float", **options) as llm:
            program = llm.engine.runner.program
            assert program is not None and {"experts", "linear"} <= set(program.operators)
            assert "aten.mm.default" not in program.operators, "the router's products have other bits in other batches"
            outputs = llm.generate(make_prompts(9, VOCABULARY, 30), GREEDY)
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]
    with torch.no_grad():
        assert_greedy(load_packed_model(tmp_path / "packed"), outputs)


def test_rounded_inputs_of_routed_experts_are_no_difference(tmp_path: Path) -> None:
    """Inputs rounded to int8 change the experts of tokens whose scores are nearly equal."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_local_experts": 8}
    build("mixtral", **sizes, tie_word_embeddings=False).eval().save_pretrained(tmp_path / "a")
    write_packed_directory(tmp_path / "a", tmp_path / "packed", "int4_g32", head=True)
    with LLM(tmp_path / "packed", max_tokens_per_step=64, skip_tokenizer_init=True) as llm:
        assert llm.engine.runner.program is not None


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        ("fp32", "auto"), ("bf16", "auto"), ("int8", "auto"), ("fp8", "auto"), ("int4_g32_zp", "float"),
        ("int3_g64", "float"), ("ternary", "float"), ("binary_g32", "float"), ("int4_g128", "auto"), ("int8", "int8"),
        ("bf16", "bf16"),
    ],
)  # fmt: skip
def test_weight_formats_serve_the_rounded_model(weights: str, activations: str, tmp_path: Path) -> None:
    from windlass.kernels.weight_format import get_weight_format

    model = saved("llama", tmp_path)
    options = {"max_tokens_per_step": 64, "max_sequences": 8, "skip_tokenizer_init": True}
    with LLM(tmp_path, weights=weights, activations=activations, **options) as llm:
        program = llm.engine.runner.program
        assert program is not None
        assert program.num_calls < 14, program.operators
        outputs = llm.generate(make_prompts(10, VOCABULARY, 30), GREEDY)
    chosen = get_weight_format(weights)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(chosen.unpack(chosen.pack(module.weight)))
    coarse = activations in ("int8", "bf16") or weights in ("int8", "int4_g128")  # these formats round inputs too
    assert_greedy(model, outputs, tolerance=0.05 if coarse else 1e-3)


def test_an_embedding_may_be_a_part_of_a_larger_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved("llama", tmp_path)
    compile_steps = PagedModelRunner.compile

    def move_embedding(self: Any, max_tokens: int, max_blocks: int) -> str | None:
        weight = self.model.get_input_embeddings().weight
        larger = torch.randn(weight.shape[0] + 7, weight.shape[1])
        larger[3:-4] = weight.detach()
        self.model.get_input_embeddings().weight = torch.nn.Parameter(larger[3:-4], requires_grad=False)
        return compile_steps(self, max_tokens, max_blocks)

    monkeypatch.setattr(PagedModelRunner, "compile", move_embedding)
    with LLM(tmp_path, max_tokens_per_step=64, max_sequences=8, skip_tokenizer_init=True) as llm:
        assert llm.engine.runner.program is not None
        outputs = llm.generate(make_prompts(5, VOCABULARY, 15), GREEDY)
    assert_greedy(model, outputs)


def test_each_layer_may_rotate_by_its_own_frequencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **arguments: Any) -> Any:
        frequencies = torch.linspace(0.1, 1.0, self.head_dim // 2) * (0.3 + self.layer_idx)
        angles = arguments["position_ids"][..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return attend(self, hidden_states, position_embeddings=(angles.cos(), angles.sin()), **arguments)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    model = saved("llama", tmp_path)
    with LLM(tmp_path, max_tokens_per_step=64, max_sequences=8, skip_tokenizer_init=True) as llm:
        program = llm.engine.runner.program
        assert program is not None
        assert program.num_calls < 4, program.operators
        outputs = llm.generate(make_prompts(5, VOCABULARY, 15), GREEDY)
    assert_greedy(model, outputs)


@pytest.mark.parametrize("vocabulary", [4, 12])
def test_models_of_few_tokens_are_recorded(vocabulary: int, tmp_path: Path) -> None:
    model = build("llama", vocab_size=vocabulary).eval()  # e.g. of nucleotides
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, max_tokens_per_step=16, max_sequences=4, skip_tokenizer_init=True) as llm:
        assert llm.engine.runner.program is not None
        outputs = llm.generate(make_prompts(5, vocabulary, 15), GREEDY)
    assert_greedy(model, outputs)


def test_a_batch_size_may_occur_first_in_inference_mode(tmp_path: Path) -> None:
    """The buffers of its calls are then written outside of inference mode too."""
    model = saved("phi3", tmp_path)
    with LLM(tmp_path, kv_cache_tokens=512, skip_tokenizer_init=True) as llm:
        assert llm.engine.runner.program is not None
        with torch.inference_mode():
            llm.generate([[5, 7, 9]], GREEDY)
        outputs = llm.generate([[11, 7, 5]], GREEDY)
    assert_greedy(model, outputs)


def test_biases_of_joined_layers_are_float32_whatever_the_default_dtype_is() -> None:
    """Recorded steps pass the biases to native code by their address."""
    layers = [torch.nn.Linear(16, 16, bias=bias) for bias in (True, False)]
    torch.set_default_dtype(torch.float64)
    try:
        bias = join_biases(layers, [16, 16])
    finally:
        torch.set_default_dtype(torch.float32)
    assert bias is not None and bias.dtype == torch.float32


def test_a_model_of_fewer_positions_than_a_recording_runs_its_modules(tmp_path: Path) -> None:
    model = build("gpt2", n_positions=8).eval()
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True) as llm:
        assert llm.engine.runner.program is None
        outputs = llm.generate([[5], [7, 9, 11]], GREEDY.replace(max_tokens=5))
    assert_greedy(model, outputs)


def test_norms_with_wider_weights_are_not_fused(tmp_path: Path) -> None:
    model = build("llama", hidden_size=64, intermediate_size=96, tie_word_embeddings=False).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path / "plain")
    write_packed_directory(tmp_path / "plain", tmp_path / "packed", "int8", head=True)
    plain = load_packed_model(tmp_path / "packed").eval()
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, check_at_load=False) as llm:
        assert llm.engine.runner.program is not None
        outputs = llm.generate(make_prompts(4, VOCABULARY, 12), GREEDY)
    with torch.no_grad():
        assert_greedy(plain, outputs, tolerance=0.1)


def test_the_weights_of_a_loaded_model_are_held_once(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with LLM(tmp_path, skip_tokenizer_init=True) as llm:
        model = llm.engine.runner.model
        held = [name for name, p in model.named_parameters() if p.dim() == 2 and p.device.type != "meta"]
        assert held == ["model.embed_tokens.weight"]


def test_formats_and_activations_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights is 'int9'; write one of .*int4_g128, "):
        EngineOptions(weights="int9")
    with pytest.raises(ConfigError, match="activations is 'fp4'; write one of auto, float, bf16, int8"):
        EngineOptions(activations="fp4")
