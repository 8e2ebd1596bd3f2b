"""Tests that the packages compressed-tensors and gguf read the same numbers from files that windlass wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import windlass
from tests.compress.test_gguf_blocks import NAMES_AND_KINDS, pack_rows
from tests.compress.test_packed_directory import IDS, body, rounded, saved
from windlass.base.errors import ModelError
from windlass.compress.gguf_blocks import find_block_type
from windlass.compress.gguf_file import SPLITTINGS, read_gguf, write_gguf
from windlass.compress.gguf_model import GgufDirectory, read_gguf_tokenizer
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.packed_model import load_packed_model
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize(
    "name",
    [
        *("int8", "fp8", "int8_zp", "ternary_g32", "int4_g32_zp", "int2_zp"),
        *(name for bits in range(1, 9) for name in (f"int{bits}", f"int{bits}_g32", f"int{bits}_g32_zp")),
    ],
)
def test_compressed_tensors_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    scheme = next(iter(QuantizationConfig.model_validate(entry).config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry(entry["format"])
    tensors, form = load_file(tmp_path / "packed" / "model.safetensors"), get_weight_format(name)
    layer = "model.layers.1.mlp.down_proj"
    packed = {part: tensors[f"{layer}.{part}"] for part in form.file_form(1, 1)}
    # The compressor multiplies in the dtype of the scale; with a scale in float32 it rounds nothing.
    wide = compressor.decompress({**packed, "weight_scale": packed["weight_scale"].float()}, scheme)
    assert torch.equal(wide["weight"], form.unpack(packed))


@pytest.mark.parametrize("name", ["int4_g32", "int8_g32"])
def test_transformers_runs_a_written_directory(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    with torch.no_grad():
        wanted = rounded(model, body(name))(IDS).logits
        torch.testing.assert_close(found(IDS).logits, wanted, rtol=2e-2, atol=2e-2)  # float16 scales round products


@pytest.mark.parametrize(("name", "kind"), [pair for pair in NAMES_AND_KINDS if pair[1] != "Q1_0"])
def test_gguf_reads_the_same_numbers(name: str, kind: str) -> None:
    """The package has no reader of Q1_0."""
    import gguf

    weights, data, _ = pack_rows(name, kind)
    found = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(found), weights)


def write_model(tmp_path: Path, name: str, **sizes: Any) -> Any:
    from tests.causal_models import build

    torch.manual_seed(3)
    model = build("llama", hidden_size=256, intermediate_size=256, max_position_embeddings=96, **sizes).eval()
    model.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    return rounded(model, body(name))


@pytest.mark.parametrize("name", ["int8_g32", "int4_g128", "ternary", "binary_g128"])
def test_a_whole_model_as_gguf(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, name)
    types = write_gguf(tmp_path / "packed", tmp_path / "model.gguf")
    assert (
        "token_embd.weight: F32" in types
        and f"blk.0.ffn_up.weight: {find_block_type(get_weight_format(name), 256).name}" in types
    )
    found = {key: get_weight_format(form).unpack(packed) if form not in ("fp32", "bf16") else packed["weight"]
             for key, (form, packed) in read_gguf(tmp_path / "model.gguf").items()}  # fmt: skip
    layer, heads = model.model.layers[1], model.config.num_attention_heads
    assert torch.equal(found["blk.1.ffn_down.weight"], layer.mlp.down_proj.weight)
    assert torch.equal(found["token_embd.weight"], model.model.embed_tokens.weight)
    query = layer.self_attn.q_proj.weight  # GGUF has the two features of a rotation side by side
    paired = query.view(heads, 2, -1, 256).transpose(1, 2).reshape(query.shape)
    assert torch.equal(found["blk.1.attn_q.weight"], paired)


@pytest.mark.parametrize("source", ["packed", "checkpoint"])
def test_the_command_writes_gguf(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from windlass.cli.main import main
    from windlass.inference.llm import LLM

    model = write_model(tmp_path, "int4_g32")
    if source == "checkpoint":
        model.load_state_dict(load_file(tmp_path / "wide" / "model.safetensors"))
        engine = windlass.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0]
        engine.save_checkpoint(str(tmp_path / "run"), tag="t")
        (tmp_path / "run" / "config.json").write_bytes((tmp_path / "wide" / "config.json").read_bytes())
        engine.destroy()
    out = tmp_path / "model.gguf"
    words = ["export", str(tmp_path / ("run" if source == "checkpoint" else "packed")), str(out), "--format", "gguf"]
    for more, code in (([], 0), ([], 1), (["--overwrite"], 0)):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        assert (ended.value.code or 0) == code
    printed = capsys.readouterr()
    assert "model.gguf exists; choose another file, or --overwrite" in printed.err
    assert ("14 Q4_0" in printed.out) == (source == "packed") and "tensors (" in printed.out
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    found = load_packed_model(out, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    with LLM(out, skip_tokenizer_init=True, max_sequences=2) as llm:
        assert llm.generate([[3, 4, 5]])[0].outputs[0].token_ids
    for bad, message in ((tmp_path / "wide", "is a directory; choose"), (out, "--dtype bf16 is for checkpoints")):
        given = ["export", str(tmp_path / "packed"), str(bad), "--format", "gguf", "--overwrite", "--dtype", "bf16"]
        with pytest.raises(SystemExit):
            main(given)
        assert message in capsys.readouterr().err


def gguf_of(tmp_path: Path, kind: str, name: str | None) -> Any:
    """Write a model as a GGUF file `model.gguf`, and return the model that it holds."""
    from tests.causal_models import model_of

    sizes = {"vocab_size": 43, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    model = model_of(kind, **sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=0).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() == 1:  # norms and biases, which begin as 1 and 0
                value.add_(0.1 * torch.randn(value.shape))
            elif "embed_tokens" in key:
                value.mul_(4)
    if name is None:
        model.bfloat16().save_pretrained(tmp_path / "wide")
        write_gguf(tmp_path / "wide", tmp_path / "model.gguf")
        return type(model).from_pretrained(tmp_path / "wide", dtype="auto")
    model.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    write_gguf(tmp_path / "packed", tmp_path / "model.gguf")
    return rounded(model, body(name))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("LlamaForCausalLM", "int4_g32"),
        ("Qwen2ForCausalLM", "int8_g32"),
        ("Qwen3ForCausalLM", "ternary"),
        ("GemmaForCausalLM", "binary_g128"),
        ("LlamaForCausalLM", None),
    ],
)
def test_a_gguf_file_is_loaded_as_a_model(kind: str, name: str | None, tmp_path: Path) -> None:
    model = gguf_of(tmp_path, kind, name)
    found = load_packed_model(tmp_path / "model.gguf")
    packed = [module for module in found.modules() if isinstance(module, PackedLinear)]
    if name is None:
        assert not packed and {parameter.dtype for parameter in found.parameters()} == {torch.bfloat16}
    else:
        block = find_block_type(get_weight_format(name), 256)
        assert len(packed) == 14 and {module.format.name for module in packed} == {block.format}
    assert type(found).__name__ == kind and found.config.tie_word_embeddings == model.config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(found(IDS % 43).logits, model(IDS % 43).logits, rtol=1e-4, atol=1e-4)


SPLITS = {"qwen2": "", "llama-bpe": "{1,3}", "gpt-2": None}


def byte_tokenizer(digits: str | None) -> Any:
    """Return a small byte-level BPE tokenizer.

    Args:
        digits: quantifier of digits in the splitting expression: `{1,3}` for Llama 3, empty for Qwen 2; None: GPT-2's
            splitting.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=digits is None)]
    if digits is not None:
        expression = next(one for one in SPLITTINGS if (r"\p{N}{1,3}" in one) == bool(digits))
        steps.insert(0, pre_tokenizers.Split(Regex(expression), "isolated"))
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    found.train_from_iterator(["the year 2024 isn't over, they'll see\n\n  indeed 12345"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("splitting", SPLITS)
def test_the_tokenizer_of_a_gguf_file_is_that_of_the_model(splitting: str, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    from tests.causal_models import build

    tokenizer = byte_tokenizer(SPLITS[splitting])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    if splitting == "llama-bpe":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 96}
    model = build("llama", **sizes, bos_token_id=0, eos_token_id=1).eval()
    model.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8_g32")
    write_gguf(tmp_path / "packed", tmp_path / "model.gguf")
    found = read_gguf_tokenizer(tmp_path / "model.gguf")
    text = "They'll see 2024, <s>isn't 12345?</s>\n\n  café the"
    wanted = tokenizer(text).input_ids
    assert (wanted[0] == 0) == (splitting == "llama-bpe")
    assert found(text).input_ids == wanted and found.decode(wanted) == tokenizer.decode(wanted)
    assert found.chat_template == tokenizer.chat_template
    assert (found.bos_token, found.eos_token) == ("<s>", "</s>")
    llm = windlass.LLM(tmp_path / "model.gguf")
    assert llm.get_tokenizer()("a").input_ids == found("a").input_ids
    ids = found("the year").input_ids
    answer = llm.generate(["the year"], windlass.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    with torch.no_grad():
        whole = torch.tensor([[*ids, *answer.outputs[0].token_ids]])
        logits = windlass.from_pretrained(type(model), tmp_path / "model.gguf")(whole).logits[0, len(ids) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(answer.outputs[0].token_ids)


def write_values(path: Path, values: dict[str, Any], architecture: str = "llama", **tensors: Any) -> Path:
    """Write a GGUF file with the keys of a one-layer model. Its only tensors are an embedding and `tensors`."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"embedding_length": 64, "block_count": 1, "feed_forward_length": 64, "context_length": 32}
    for key, value in {**sizes, "attention.head_count": 2, **values}.items():
        name = key if "." in key and key.startswith(("tokenizer", "split")) else f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(name, value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), dtype=np.float32))
    for name, data in tensors.items():
        kind = gguf.GGMLQuantizationType.Q5_1 if data.dtype == np.uint8 else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_types_and_settings_of_gguf_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import gguf

    turns = 8192 / (2 * np.pi) * 10000.0 ** -(np.arange(0, 32, 2) / 32)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    blocks = gguf.quantize(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32),
                           gguf.GGMLQuantizationType.Q5_1)  # fmt: skip
    path = tmp_path / "x.gguf"
    found = GgufDirectory(write_values(path, {}, **{"rope_freqs.weight": factors, "blk.0.ffn_up.weight": blocks}))
    assert "1 tensors of type Q5_1, which no weight format is; they are held as floats" in caplog.text
    wanted = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q5_1))
    assert torch.equal(found.read("model.layers.0.mlp.up_proj.weight"), wanted) and not found.formats
    assert found.config["rope_parameters"]["rope_type"] == "llama3" and found.config["rope_parameters"]["factor"] == 8
    for said, values, more in (
        ("factors of rotations", {}, {"rope_freqs.weight": 2 * factors}),
        ("llama.rope.scaling.factor = 4", {"rope.scaling.factor": 4.0}, {}),
        ("llama.expert_count = 4", {"expert_count": 4}, {}),
        (r"\[2\] as llama.attention.head_count", {"attention.head_count": [2]}, {}),
        ("heads of 32 features with values or rotations", {"rope.dimension_count": 16}, {}),
        ("one of 2 parts", {"split.count": 2}, {}),
        ("tensor 'blk.0.ssm_a' of .* has no place", {}, {"blk.0.ssm_a": factors}),
    ):
        with pytest.raises(ModelError, match=said):
            GgufDirectory(write_values(path, values, **more))
    with pytest.raises(ModelError, match="architecture 'bert'; windlass reads llama, qwen2"):
        GgufDirectory(write_values(path, {}, "bert"))
    with pytest.raises(ModelError, match="kind 'bert', splitting 'gpt-2', which windlass does not read; give"):
        read_gguf_tokenizer(write_values(path, {"tokenizer.ggml.model": "bert"}))
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581", "\u2581ab"]
    scores, kinds = [0.0, 0.0, 0.0, -3.0, -4.0, -1.0, -2.0, -0.5], [2, 3, 3, 1, 1, 1, 1, 1]
    ids = {f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("unknown", "bos", "eos"))}
    pieces = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}
    read = read_gguf_tokenizer(write_values(path, {"tokenizer.ggml.model": "llama", **ids, **pieces}))
    assert read("ab").input_ids[-1] == 7


@pytest.mark.parametrize("name", [None, "int8_g32"])
def test_a_gguf_file_is_compressed_and_generated_from(
    name: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.causal_models import build
    from windlass.cli.main import main

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        assert not end.value.code
        return capsys.readouterr().out

    tokenizer = byte_tokenizer(SPLITS["qwen2"])
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 96}
    model = build("llama", **sizes, bos_token_id=0, eos_token_id=1).eval()
    model.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")
    source, path = tmp_path / "wide", tmp_path / "model.gguf"
    if name is not None:
        write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
        source = tmp_path / "packed"
        rounded(model, body(name)).save_pretrained(tmp_path / "wide")
    write_gguf(source, path)
    before = sorted(one.name for one in tmp_path.iterdir())
    chosen = ["--weights", "int4", "--group", "32", "--no-measure"]
    printed = [
        run("compress", str(given), str(tmp_path / out), *chosen)
        for given, out in ((path, "of gguf"), (tmp_path / "wide", "of directory"))
    ]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*before, "of directory", "of gguf"])
    here, there = (load_file(tmp_path / out / "model.safetensors") for out in ("of gguf", "of directory"))
    assert here.keys() == there.keys()
    for key, value in there.items():
        assert torch.equal(here[key], value), key
    assert f"{path} is unpacked to" in printed[0]
    prompt = ["--prompt", "the year", "--temperature", "0", "--max-new-tokens", "4"]
    assert run("generate", str(path), *prompt) == run("generate", str(tmp_path / "wide"), *prompt)
