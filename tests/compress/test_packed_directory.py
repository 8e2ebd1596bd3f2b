"""Tests of directories of packed weights: written from an unquantized model, loaded and served with the rounded
numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import windlass
from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import assert_greedy, make_prompts
from windlass.base.errors import ModelError, WeightFormatError
from windlass.compress import packed_directory, partial_directory
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.packed_model import is_packed_directory, load_packed_model
from windlass.compress.post_training import RoundingOptions, compress_directory
from windlass.compress.rounded_model import load_rounded_model
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.bit_packing import pack_words
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.reference.quantized_input import quantize_groups
from windlass.kernels.weight_format import get_weight_format

IDS = torch.arange(20).view(2, 10)


def saved(directory: Path, name: str = "llama") -> Any:
    torch.manual_seed(3)
    model = build(name, hidden_size=64, intermediate_size=96, max_position_embeddings=96).eval()
    model.save_pretrained(directory)
    return model


def rounded(model: Any, formats: Callable[[str], str | None]) -> Any:
    """Round the linear layers of a model in place."""
    with torch.no_grad():
        for name, module in model.named_modules():
            chosen = formats(name) if isinstance(module, torch.nn.Linear) else None
            if chosen is not None:
                form = get_weight_format(chosen)
                module.weight.copy_(form.unpack(form.pack(module.weight)))
    return model


def body(name: str) -> Callable[[str], str | None]:
    return lambda layer: None if layer == "lm_head" else name


@pytest.mark.parametrize(
    "name",
    [
        *("int8", "fp8", "int8_g32", "int8_zp", "int7", "int6_g32_zp", "int5_g32", "int4_g32", "int4_g64_zp", "int3"),
        *("int1_g32_zp", "ternary", "binary_g32"),
    ],
)
def test_a_written_directory_has_the_rounded_numbers(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide")
    report = write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    assert set(report.layers.values()) == {name} and report.kept == {"lm_head": "the output head stays unquantized"}
    sizes = sum(path.stat().st_size for path in (tmp_path / "packed").glob("*.safetensors"))
    assert report.bytes_after < sizes < report.bytes_after + 20_000
    assert report.packed_after < report.packed_before / 3
    # other readers refuse groups that do not divide the 64 and 96 features
    own = name in ("int4_g64_zp", "ternary", "binary_g32")
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == ("windlass" if own else "compressed-tensors")
    found = load_packed_model(tmp_path / "packed")
    packed = [layer for layer, module in found.named_modules() if isinstance(module, PackedLinear)]
    assert sorted(packed) == sorted(report.layers) and len(packed) == 7 * model.config.num_hidden_layers
    with torch.no_grad():
        wanted = rounded(model, body(name))(IDS).logits
        torch.testing.assert_close(found(IDS).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_rows_are_read_from_words(dtype: torch.dtype, tmp_path: Path) -> None:
    """compressed-tensors also writes symmetric 8 bits of a row as `pack-quantized`."""
    model = saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8")
    wanted = load_packed_model(tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        layer = name.removesuffix(".weight_scale")
        codes = tensors.pop(f"{layer}.weight")
        tensors[f"{layer}.weight_packed"] = pack_words((codes.to(torch.int16) + 128).to(torch.uint8), 8)
        tensors[f"{layer}.weight_shape"] = torch.tensor(codes.shape)
        tensors[name] = tensors[name].to(dtype)
        module = wanted.get_submodule(layer)
        assert isinstance(module, PackedLinear)
        module.set_packed({"weight": codes, "weight_scale": tensors[name].float()})
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    path = tmp_path / "packed" / "config.json"
    path.write_text(path.read_text().replace("int-quantized", "pack-quantized"))
    found = load_packed_model(tmp_path / "packed")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, wanted(IDS).logits, rtol=1e-5, atol=1e-5)
    assert sum(isinstance(module, PackedLinear) for module in found.modules()) == 7 * model.config.num_hidden_layers


def test_layers_of_different_formats_and_several_files(tmp_path: Path) -> None:
    model = saved(tmp_path / "wide")

    def formats(layer: str) -> str | None:
        return "int4_g32" if "mlp" in layer else "int8_g32_zp" if "self_attn" in layer else None

    write_packed_directory(tmp_path / "wide", tmp_path / "packed", formats, file_bytes=20_000)
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert entry["format"] == "pack-quantized" and len(entry["config_groups"]) == 2
    assert len(list((tmp_path / "packed").glob("model-*.safetensors"))) > 3
    found = windlass.from_pretrained(AutoModelForCausalLM, tmp_path / "packed")
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, rounded(model, formats)(IDS).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="takes no argument but dtype, .* and got attn_implementation"):
        windlass.from_pretrained(AutoModelForCausalLM, tmp_path / "packed", attn_implementation="eager")


def test_packed_models_are_not_saved_as_bytes(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32")
    for model in (load_packed_model(tmp_path / "packed"), load_rounded_model(tmp_path / "wide", "int4_g32")):
        with pytest.raises(ModelError, match=r"layer 'model\.layers\.0\.self_attn\.q_proj' of .* replace each"):
            model.save_pretrained(tmp_path / "again")
        assert not (tmp_path / "again").exists()
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.to_linear())
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("name", "head"), [("int4_g32_zp", True), ("int2_g64", False), ("binary_g64", False)])
def test_packed_directories_are_served(name: str, head: bool, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name, head=head)
    options = {"max_tokens_per_step": 64, "max_sequences": 8, "skip_tokenizer_init": True}
    with LLM(tmp_path / "packed", activations="float", **options) as llm:
        panels = [group.panels for group in llm.engine.runner._packed.groups]
        assert {one.format.name for one in panels} == ({name} if head else {name, "fp32"})
        assert len(panels) == 4 * model.config.num_hidden_layers + 1, "query, key and value are joined, and gate and up"
        assert llm.engine.runner.program is not None
        held = [p for p in llm.engine.runner.model.parameters() if p.device.type != "meta" and p.dim() == 2]
        assert [tuple(p.shape) for p in held] == [(VOCABULARY, 64)], "weights are held once, in panels"
        outputs = llm.generate(make_prompts(6, VOCABULARY, 30), SamplingParams(temperature=0, max_tokens=8, logprobs=2))
    assert_greedy(rounded(model, lambda layer: name if head or layer != "lm_head" else None), outputs)
    with pytest.raises(windlass.WindlassError, match=f"'int8', but the model is packed as '{name}' already"):
        LLM(tmp_path / "packed", weights="int8", **options)


@pytest.mark.parametrize("name", ["int8", "int4_g32", "int2_g64"])
def test_inputs_are_rounded_by_default_as_the_reference_does(name: str, tmp_path: Path) -> None:
    """Errors against a reference that rounds inputs are below 0.2 of those against one with float inputs.

    They are not zero, because some codes of inputs differ by 1.
    """
    model = saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    prompts = make_prompts(6, VOCABULARY, 30)
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, max_tokens_per_step=64, max_sequences=8) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True))
    wide = rounded(model, body(name))
    floats = answer_error(wide, outputs)
    for layer, module in wide.named_modules():
        if isinstance(module, torch.nn.Linear) and layer != "lm_head":
            module.register_forward_pre_hook(lambda layer, inputs: (quantize_groups(inputs[0]), *inputs[1:]))
    assert answer_error(wide, outputs) < 0.2 * floats


@torch.no_grad()
def answer_error(model: Any, outputs: list[Any]) -> float:
    """Return the mean absolute difference of log-probabilities between the answers and `model` for the same tokens."""
    errors = []
    for output in outputs:
        answer, start = output.outputs[0], len(output.prompt_token_ids)
        tokens = torch.tensor([[*output.prompt_token_ids, *answer.token_ids]])
        wanted = model(tokens[:, :-1], use_cache=False).logits[0, start - 1 :].log_softmax(-1)
        found = [one[token].logprob for one, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        errors.append(torch.tensor(found) - wanted.gather(1, tokens[0, start:, None])[:, 0])
    return float(torch.cat(errors).abs().mean())


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("rtn", torch.float32), ("hqq", torch.bfloat16), ("gptq", torch.float32), ("awq", torch.float32)],
)
def test_a_layer_without_a_scale_for_its_weights_has_16_bits(method: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide").to(dtype)
    large, near = model.model.layers[0].mlp.up_proj, model.model.layers[1].self_attn.k_proj
    with torch.no_grad():
        large.weight[3, 5], near.weight[2, 7] = 3e6, 4e5  # int4's limit is 7.5 x float16's maximum = 491,280
    model.save_pretrained(tmp_path / "wide")
    batches = [IDS.clone(), IDS.flip(1)] if method in ("gptq", "awq") else []
    options = RoundingOptions(method)
    report, _ = compress_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32", options, batches=batches)
    name = "model.layers.0.mlp.up_proj"
    largest = f"{float(torch.tensor(3e6, dtype=dtype)):.4g}"
    assert report.kept[name] == f"int4_g32 has no scale for its largest weight, {largest}; it is left in bf16"
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    assert tensors[f"{name}.weight"].dtype == torch.bfloat16 and tensors["model.norm.weight"].dtype == dtype
    entry = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert name in entry["ignore"] and report.bytes_after == sum(one.nbytes for one in tensors.values())
    assert len(report.layers) == 13 and name not in report.layers
    found = load_packed_model(tmp_path / "packed")
    kept = found.get_submodule(name)
    assert torch.equal(kept.weight, tensors[f"{name}.weight"]) and abs(kept.weight[3, 5].float() / 3e6 - 1) < 2**-8
    packed = {f"{n}.weight": one.unpack() for n, one in found.named_modules() if isinstance(one, PackedLinear)}
    twin = saved(tmp_path / "twin")
    twin.load_state_dict({**{key: tensors[key] for key in twin.state_dict() if key in tensors}, **packed})
    with torch.no_grad():
        limit = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found(IDS).logits.float(), twin(IDS).logits, rtol=limit, atol=limit)
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, activations="float", max_sequences=2) as llm:
        outputs = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True))
    assert answer_error(twin, outputs) < limit
    assert isinstance(found.model.layers[1].self_attn.k_proj, PackedLinear) and found(IDS).logits.isfinite().all()
    with torch.no_grad():
        large.weight[3, 5] = torch.nan
    model.save_pretrained(tmp_path / "wide")
    with pytest.raises(
        (ModelError, WeightFormatError), match=r"layer 'model\.layers\.0\.mlp\.up_proj' of .*not finite"
    ):
        write_packed_directory(tmp_path / "wide", tmp_path / "again", "int4_g32")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_tensors_that_stay_unquantized_have_the_requested_dtype(method: Any, tmp_path: Path) -> None:
    model = saved(tmp_path / "wide")
    batches = [IDS.clone(), IDS.flip(1)] if method == "gptq" else []
    found = {}
    for dtype in (None, torch.bfloat16):
        target = tmp_path / str(dtype)
        options = RoundingOptions(method)
        report, _ = compress_directory(
            tmp_path / "wide", target, "int4_g32", options, batches=batches, wide_dtype=dtype
        )
        found[dtype] = load_file(target / "model.safetensors")
        assert report.bytes_after == sum(one.nbytes for one in found[dtype].values())
    for name, tensor in found[torch.bfloat16].items():
        wide = found[None][name]
        if name in model.state_dict():
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, wide.to(torch.bfloat16)), name
        else:
            assert torch.equal(tensor, wide), "packed weights are rounded from those of the model"
    config = json.loads((tmp_path / "torch.bfloat16" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert load_packed_model(tmp_path / "torch.bfloat16")(IDS).logits.dtype == torch.bfloat16
    with torch.no_grad():
        model.model.embed_tokens.weight[2, 3] = 1e5
    model.save_pretrained(tmp_path / "wide")
    with pytest.raises(WeightFormatError, match=r"tensor 'model.embed_tokens.weight' .* outside of the range of .*16"):
        write_packed_directory(tmp_path / "wide", tmp_path / "no", "int4_g32", wide_dtype=torch.float16)


def test_an_interrupted_run_continues_where_it_stopped(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    layers: list[str] = []

    def fail(layer: str, weight: torch.Tensor, form: Any) -> Any:
        if len(layers) == 4:
            raise KeyboardInterrupt
        layers.append(layer)
        return form.pack(weight)

    def count(layer: str, weight: torch.Tensor, form: Any) -> Any:
        assert layer not in layers, "a layer that the interrupted run completed"
        layers.append(layer)
        return form.pack(weight)

    partial = tmp_path / ".packed.partial"
    with pytest.raises(KeyboardInterrupt):
        write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32", pack=fail)
    assert {path.name for path in tmp_path.iterdir()} == {"wide", ".packed.partial"}, "nothing under the name itself"
    with open(partial / "journal", "a") as journal:
        journal.write("model.norm.wei")  # a process that ends in the middle of a line
    report = write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32", pack=count)
    assert sorted(layers) == sorted(report.layers) and not partial.exists()
    write_packed_directory(tmp_path / "wide", tmp_path / "whole", "int4_g32")
    assert read_files(tmp_path / "packed") == read_files(tmp_path / "whole")
    with pytest.raises(ModelError, match="packed exists"):
        write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8")
    layers.clear()
    with pytest.raises(KeyboardInterrupt):
        write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8", pack=fail, overwrite=True)
    assert read_files(tmp_path / "packed") == read_files(tmp_path / "whole"), "replaced only when complete"
    # Continue with other settings than the interrupted run, then with another model under the same name.
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32", overwrite=True)
    assert read_files(tmp_path / "packed") == read_files(tmp_path / "whole") and not partial.exists()
    layers.clear()
    with pytest.raises(KeyboardInterrupt):
        write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32", pack=fail, overwrite=True)
    build("llama", 7, hidden_size=64, intermediate_size=96, max_position_embeddings=96).save_pretrained(
        tmp_path / "wide"
    )
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32", overwrite=True)
    write_packed_directory(tmp_path / "wide", tmp_path / "whole", "int4_g32", overwrite=True)
    assert read_files(tmp_path / "packed") == read_files(tmp_path / "whole")


def test_files_of_a_stopped_run_in_the_source_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "wide")
    for name in ("plan.json", "journal"):  # as a process leaves them that is stopped right after the renaming
        (tmp_path / "wide" / name).write_text("{}")
    packed: list[str] = []

    def pack(layer: str, weight: torch.Tensor, form: Any) -> Any:
        packed.append(layer)
        return form.pack(weight)

    def stop(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(partial_directory, "replace_directory", stop)
        with pytest.raises(KeyboardInterrupt):
            write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8", pack=pack)
    packed.clear()
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8", pack=pack)
    assert not packed  # the run continued


def read_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_second_writer_of_a_directory_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "wide")

    refused: list[str] = []

    def inner(layer: str, weight: torch.Tensor, form: Any) -> Any:
        with pytest.raises(ModelError, match=r"another process writes .*\.packed\.partial"):
            write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8")
        refused.append(layer)
        return form.pack(weight)

    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8", pack=inner)
    assert refused


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "wide")
    read = packed_directory.ModelDirectory.read
    alive: list[Any] = []
    names: set[str] = set()

    def watched(self: Any, name: str) -> torch.Tensor:
        import weakref

        assert not [ref for ref in alive if ref() is not None], "the tensor before is still held"
        tensor = read(self, name)
        names.add(name)
        alive[:] = [weakref.ref(tensor)]
        return tensor

    monkeypatch.setattr(packed_directory.ModelDirectory, "read", watched)
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32")
    assert names == set(packed_directory.ModelDirectory(tmp_path / "wide").places)


def test_directories_that_cannot_be_packed_or_loaded(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    assert not is_packed_directory(tmp_path / "wide") and not is_packed_directory(tmp_path)
    with pytest.raises(ModelError, match="not quantized"):
        load_packed_model(tmp_path / "wide")
    with pytest.raises(WeightFormatError, match="no weight format named 'nf4'"):
        write_packed_directory(tmp_path / "wide", tmp_path / "no", "nf4")
    with pytest.raises(ModelError, match=r"no config\.json"):
        write_packed_directory(tmp_path, tmp_path / "no", "int8")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32")
    assert is_packed_directory(tmp_path / "packed")
    with pytest.raises(ModelError, match=r"quantized already \(compressed-tensors\)"):
        write_packed_directory(tmp_path / "packed", tmp_path / "no", "int8")
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    for change, said in (({"num_bits": 9}, "no weight format has 9 bits"), ({"group_size": 48}, "group size 48")):
        path.write_text(json.dumps({**config, "quantization_config": {
            **config["quantization_config"],
            "config_groups": {"group_0": {"format": "pack-quantized", "weights": {**weights, **change}}},
        }}))  # fmt: skip
        with pytest.raises(ModelError, match=said):
            load_packed_model(tmp_path / "packed")
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ModelError, match="quant_method is 'bitsandbytes'"):
        load_packed_model(tmp_path / "packed")
    path.write_text(json.dumps(config))
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if key != "model.norm.weight"}, file)
    with pytest.raises(ModelError, match=r"lacks 1 tensors of the model: model\.norm\.weight"):
        load_packed_model(tmp_path / "packed")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="truncated or damaged"):
        load_packed_model(tmp_path / "packed")


def edited(directory: Path, entry: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Change the quantization and the tensors of a directory."""
    path, file = directory / "config.json", directory / "model.safetensors"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {**config["quantization_config"], **entry}}))
    save_file({**load_file(file), **tensors}, file)


def test_groups_in_activation_order_have_their_own_features(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32")
    torch.manual_seed(0)
    order, layer = (torch.arange(64) // 32)[torch.randperm(64)], "model.layers.0.self_attn.q_proj"
    plain = load_packed_model(tmp_path / "packed").get_submodule(layer)
    unused = torch.full((64,), -1, dtype=torch.int32)
    edited(tmp_path / "packed", {}, {
        f"{layer}.weight_g_idx": order.int(), "model.layers.0.self_attn.k_proj.weight_g_idx": unused,
    })  # fmt: skip
    found = load_packed_model(tmp_path / "packed")
    coded = get_weight_format("int4_g32").unpack_codes(plain.packed())
    wanted = (coded.codes.float() - 8) * coded.scale.float()[:, order]
    assert torch.equal(found.get_submodule(layer).weight, wanted) and not torch.equal(plain.weight, wanted)
    assert found.get_submodule(layer).format.name == "int4_g32_ordered"
    assert found.get_submodule("model.layers.0.self_attn.k_proj").format.name == "int4_g32"


@pytest.mark.parametrize("name", ["int4_g32", "int8_g32_zp"])
def test_scales_outside_of_float16_keep_their_numbers(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", name)
    first, second = (f"model.layers.0.self_attn.{one}_proj" for one in "qk")
    before = load_packed_model(tmp_path / "packed")
    scales = {one: before.get_submodule(one).packed()["weight_scale"].float() for one in (first, second)}
    edited(tmp_path / "packed", {}, {
        f"{first}.weight_scale": scales[first] * 2.0**-24, f"{second}.weight_scale": scales[second] * 2.0**24,
    })  # fmt: skip
    found = load_packed_model(tmp_path / "packed")
    for one, factor in ((first, 2.0**-24), (second, 2.0**24)):
        assert torch.equal(found.get_submodule(one).unpack(), before.get_submodule(one).unpack() * factor)
    edited(tmp_path / "packed", {}, {f"{first}.weight_scale": scales[first] * float("inf")})
    with pytest.raises(ModelError, match=r"q_proj\.weight_scale has values outside of the range of torch\.float16"):
        load_packed_model(tmp_path / "packed")


def with_own_head(directory: Path) -> Any:
    """Write a model whose configuration ties its head, and whose files have another one."""
    saved(directory, "llama")
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def test_a_stored_head_that_the_configuration_ties_is_kept(tmp_path: Path) -> None:
    model = with_own_head(tmp_path / "wide")
    report = write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8_g32", head=True)
    assert report.layers["lm_head"] == "int8_g32"
    assert not json.loads((tmp_path / "packed" / "config.json").read_text())["tie_word_embeddings"]
    rounds = [
        load_packed_model(tmp_path / "packed"),
        load_rounded_model(tmp_path / "wide", "int8_g32", everything=True),
    ]
    with torch.no_grad():
        for found in rounds:
            difference = (found(IDS).logits - model(IDS).logits).abs().max()
            assert float(difference) < 0.05 * float(model(IDS).logits.abs().max())


def test_a_stored_copy_of_the_embedding_stays_tied(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    file, path = tmp_path / "wide" / "model.safetensors", tmp_path / "wide" / "config.json"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    report = write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8_g32", head=True)
    assert report.kept == {"lm_head": "it shares another tensor"}
    found = load_packed_model(tmp_path / "packed")
    assert found.lm_head.weight is found.model.embed_tokens.weight


@pytest.mark.parametrize("kind", ["XLMRobertaForCausalLM", "XLMRobertaForMaskedLM", "CamembertForMaskedLM"])
def test_a_tied_head_that_the_model_registers_before_its_embedding_is_filled(kind: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    sizes = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = cls(cls.config_class(**sizes, num_attention_heads=4, max_position_embeddings=32, is_decoder=False)).eval()
    with torch.no_grad():
        model.lm_head.bias.normal_()
    model.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8", head=True)
    for found in (
        load_packed_model(tmp_path / "packed", cls),
        load_rounded_model(tmp_path / "wide", "int8", cls, everything=True),
    ):
        assert isinstance(found.lm_head.dense, PackedLinear)
        with torch.no_grad():
            difference = (found(IDS).logits - model(IDS).logits).abs().max()
            assert float(difference) < 0.05 * float(model(IDS).logits.abs().max())


def test_a_head_that_shares_an_embedding_of_another_class_stays_wide(tmp_path: Path) -> None:
    model = saved(tmp_path / "wide", "gemma3")  # the embedding multiplies its outputs
    found = load_rounded_model(tmp_path / "wide", "int8", everything=True)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert isinstance(found.model.layers[0].mlp.up_proj, PackedLinear)
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, rounded(model, body("int8"))(IDS).logits, rtol=1e-4, atol=1e-4)


def test_targets_are_names_expressions_or_the_class(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    formats = {"mlp": "int4_g32", "self_attn": "int8_g32"}
    write_packed_directory(
        tmp_path / "wide", tmp_path / "packed", lambda name: next((f for k, f in formats.items() if k in name), None)
    )
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    by_bits = {group["weights"]["num_bits"]: group for group in groups.values()}
    for targets in ((["re:.*mlp.*"], ["Linear"]), (["re:model.layers.[01].mlp"], ["re:.*self_attn"])):
        by_bits[4]["targets"], by_bits[8]["targets"] = targets
        edited(tmp_path / "packed", {"config_groups": {"b": by_bits[8], "a": by_bits[4]}}, {})
        found = load_packed_model(tmp_path / "packed")
        assert {found.get_submodule(f"model.layers.1.{name}").format.name for name in ("mlp.up_proj",)} == {"int4_g32"}
        assert found.get_submodule("model.layers.1.self_attn.o_proj").format.name == "int8_g32"
    by_bits[8]["targets"] = ["re:.*k_proj"]
    edited(tmp_path / "packed", {"config_groups": {"b": by_bits[8], "a": by_bits[4]}}, {})
    with pytest.raises(ModelError, match=r"no target for the packed layer 'model\.layers\.0\.self_attn\.o_proj'"):
        load_packed_model(tmp_path / "packed")


def test_a_single_file_is_read_before_an_index(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "old.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), "old.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {place.path.name for place in ModelDirectory(tmp_path).places.values()} == {"model.safetensors"}


def test_a_target_that_holds_the_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "models" / "wide")
    for target, said in (("models/wide", "is"), ("models", "contains")):
        with pytest.raises(ModelError, match=f"{said} .*wide, which is read; choose another directory"):
            write_packed_directory(tmp_path / "models" / "wide", tmp_path / target, "int8", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="file is a file; choose a directory"):
        write_packed_directory(tmp_path / "models" / "wide", tmp_path / "file", "int8", overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(ModelError, match=r"holds something else than a model: it has no config\.json"):
        write_packed_directory(tmp_path / "models" / "wide", tmp_path / "home", "int8", overwrite=True)
    assert (tmp_path / "home" / "letter.txt").is_file()
    (tmp_path / "run" / "checkpoint-500").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="run holds the folder checkpoint-500, which is not part of a model"):
        write_packed_directory(tmp_path / "models" / "wide", tmp_path / "run", "int8", overwrite=True)
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    write_packed_directory(tmp_path / "models" / "wide", tmp_path / "link", "int8")
    write_packed_directory(tmp_path / "models" / "wide", tmp_path / "models" / "wide" / "inside", "int8")
    assert (tmp_path / "disk" / "config.json").is_file() and (tmp_path / "link").is_symlink()
    assert is_packed_directory(tmp_path / "models" / "wide" / "inside")


def test_a_directory_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "out", "int8")
    before = read_files(tmp_path / "out")

    def stop(path: Path) -> None:
        assert path.name != "out", "never removed under its name"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(partial_directory.shutil, "rmtree", stop)
        write_packed_directory(tmp_path / "wide", tmp_path / "out", "int4_g32", overwrite=True)
    assert read_files(tmp_path / ".out.previous") == before
    write_packed_directory(tmp_path / "wide", tmp_path / "out", "int4_g32", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"wide", "out"} and read_files(tmp_path / "out") != before


def test_directory_with_an_adapter_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "wide")
    (tmp_path / "wide" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"has an adapter beside the model .*merge it"):
        write_packed_directory(tmp_path / "wide", tmp_path / "out", "int8")
    (tmp_path / "wide" / "config.json").unlink()
    with pytest.raises(ModelError, match="is an adapter of peft, not a full model; merge it into its base"):
        write_packed_directory(tmp_path / "wide", tmp_path / "out", "int8")


def with_packed_values(model: Any, packed: torch.nn.Module) -> Any:
    """Give a GPT-2 the values of a packed one."""
    state = {name: value for name, value in packed.state_dict().items() if name in model.state_dict()}
    for name, module in packed.named_modules():
        if isinstance(module, PackedLinear) or type(module) is torch.nn.Linear and name != "lm_head":
            state[f"{name}.weight"] = module.weight.t()
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    return model


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_conv1d_layers_are_packed_as_linear_ones(method: str, tmp_path: Path) -> None:
    model: Any = build("gpt2", n_embd=64, n_head=4, n_positions=96).eval()
    model.save_pretrained(tmp_path / "wide")
    batches = [torch.arange(40).view(2, 20)] if method == "gptq" else []
    report, _ = compress_directory(
        tmp_path / "wide",
        tmp_path / "packed",
        lambda name: None if name.endswith("1.mlp.c_fc") else "int4_g32",
        RoundingOptions(method),  # type: ignore[arg-type]
        batches=batches,
    )
    assert len(report.layers) == 7 and report.kept["transformer.h.1.mlp.c_fc"] == "no format was chosen"
    found = load_packed_model(tmp_path / "packed")
    kept = found.get_submodule("transformer.h.1.mlp.c_fc")
    assert type(kept) is torch.nn.Linear and kept.weight.shape == (256, 64)
    if method == "rtn":
        assert torch.equal(kept.weight, model.transformer.h[1].mlp.c_fc.weight.t())
    reference = with_packed_values(model, found)
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, reference(IDS).logits, rtol=1e-4, atol=1e-4)
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, max_sequences=2, activations="float") as llm:
        prompts = make_prompts(2, VOCABULARY)
        assert_greedy(reference, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)))
    rounded_while_read = windlass.from_pretrained(AutoModelForCausalLM, tmp_path / "wide", weights="int4_g32")
    assert rounded_while_read.get_submodule("transformer.h.0.attn.c_attn").format.name == "int4_g32"
    with pytest.raises(ModelError, match="written as linear ones only with packed weights"):
        write_packed_directory(tmp_path / "wide", tmp_path / "plain", "fp32")
