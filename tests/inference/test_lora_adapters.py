"""Law: a request with a LoRA adapter gets the tokens of peft's own model, for any adapters in its batch."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.causal_models import VOCABULARY, build
from tests.compress.test_packed_directory import body, rounded
from tests.inference.greedy_reference import assert_greedy, make_prompts
from tests.inference.peft_adapters import ATTENTION, assert_adapters, reference, write_adapter, write_three
from windlass.base.errors import ConfigError, ModelError, RequestError
from windlass.compress import model_directory
from windlass.compress.packed_directory import write_packed_directory
from windlass.inference.llm import LLM
from windlass.inference.lora_request import LoRARequest
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels.inference_path import get_inference_path

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)

# peft 0.21 uses a name that transformers deprecates
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


def served(name: str) -> Any:
    limit = {"gpt2": {"n_positions": 96}, "bloom": {}}.get(name, {"max_position_embeddings": 96})
    return build(name, **limit).eval()


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        pytest.param(name, budget, marks=() if (budget == 6) == (number % 2 == 0) else pytest.mark.slow)
        for number, name in enumerate(sorted(ATTENTION))
        for budget in (6, 64)
    ],
)
def test_mixed_adapters_generate_what_peft_does(name: str, budget: int, tmp_path: Path) -> None:
    """Cover the paged runner and, with bloom, the own-cache runner. Half of the prompts share a prefix."""
    model = served(name)
    directories = write_three(model, name, tmp_path)
    before = copy.deepcopy(model.state_dict())
    prompts = make_prompts(16, VOCABULARY, 7, shared=18)
    wanted = [[None, *directories][number // 2 % 4] for number in range(16)]
    options = {"max_tokens_per_step": budget, "max_sequences": min(budget, 8), "kv_cache_tokens": 256}
    with LLM(model, **options, max_model_len=32, lora=directories) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=wanted)
        again = llm.generate(prompts, GREEDY, lora_request=wanted)  # from the prefix cache
        assert llm.stats().kv_cache_usage == 0
        # the module itself computes without adapters between steps
        assert_greedy(model, [output for output in outputs if output.lora_name is None])
    assert [output.lora_name for output in outputs] == wanted
    assert_adapters(model, outputs, directories)
    assert_adapters(model, again, directories)
    assert all("forward" not in module.__dict__ for module in model.modules())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_an_adapter_with_its_directory_is_loaded_at_its_first_use(tmp_path: Path) -> None:
    model = served("llama")
    folders = [write_adapter(model, tmp_path / str(n), n, r=2, target_modules=["q_proj"]) for n in (0, 1)]
    first, second = (LoRARequest(f"adapter-{n}", n + 1, folder) for n, folder in enumerate(folders))
    with LLM(model, check_at_load=False, max_tokens_per_step=32, max_sequences=8) as llm:
        prompts = make_prompts(3, VOCABULARY)
        outputs = llm.generate(prompts, GREEDY, lora_request=[first, None, second])
        assert_adapters(model, outputs, {"adapter-0": folders[0], "adapter-1": folders[1]})
        again = llm.generate(prompts[:1], GREEDY, lora_request=first)
        assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="was loaded from .*0, and lora_path is .*1; use another name"):
            llm.generate(prompts, GREEDY, lora_request=LoRARequest("adapter-0", 1, folders[1]))
        llm.engine.remove_lora("adapter-0")  # the name can be used again, also for another directory
        again = LoRARequest("adapter-0", 1, folders[1])
        assert_adapters(
            model, llm.generate(prompts, GREEDY, lora_request=[again, None, None]), {"adapter-0": folders[1]}
        )
        with pytest.raises(ModelError):
            llm.generate(prompts, GREEDY, lora_request=LoRARequest("missing", 3, tmp_path / "missing"))


def test_an_adapter_from_another_directory_is_never_used_by_its_name(tmp_path: Path) -> None:
    model = served("llama")
    folders = [write_adapter(model, tmp_path / str(n), n, r=2, target_modules=["q_proj"]) for n in (0, 1)]
    with LLM(model, check_at_load=False, lora={"at load": folders[0]}) as llm:
        with torch.device("meta"):  # a default device of the caller does not matter
            llm.engine.add_lora("later", folders[0])
        for name in ("at load", "later"):
            same = LoRARequest(name, 1, folders[0].parent / "x" / ".." / "0")
            assert llm.generate([[3, 4]], GREEDY, lora_request=same)[0].lora_name == name
            with pytest.raises(
                RequestError, match=f"'{name}' was loaded from .*/0, and lora_path is .*/1; use another"
            ):
                llm.generate([[3, 4]], GREEDY, lora_request=LoRARequest(name, 1, folders[1]))
        llm.engine.remove_lora("later")
        again = llm.generate([[3, 4]], GREEDY, lora_request=LoRARequest("later", 1, folders[1]))
        assert_greedy(reference(model, folders[1]), again)


def test_layers_may_get_their_inputs_by_name(tmp_path: Path) -> None:
    model = served("llama")
    directory = write_adapter(model, tmp_path / "a", r=4, target_modules=["down_proj"])
    called: Any = copy.deepcopy(model)
    for layer in called.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    with LLM(called, lora={"a": directory}) as llm:
        assert_adapters(model, llm.generate([[3, 4], [5]], GREEDY, lora_request=["a", None]), {"a": directory})


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")  # peft expects both paths
def test_a_module_with_two_paths_has_one_adapter(tmp_path: Path) -> None:
    """The keys of a state dict, which some versions of peft save, name a shared module by each of its paths."""
    model = served("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    first = write_adapter(model, tmp_path / "first", r=4, target_modules=["down_proj"])
    weights = load_file(first / "adapter_model.safetensors")
    twins = {key.replace("layers.0", "layers.1"): tensor.clone() for key, tensor in weights.items()}
    assert not twins.keys() & weights.keys()
    changed = {key: tensor + 1 for key, tensor in twins.items()}
    folders = {"first": first}
    for name, tensors in (("second", twins), ("both", {**weights, **twins}), ("differ", {**weights, **changed})):
        folders[name] = Path(shutil.copytree(first, tmp_path / name))
        save_file(tensors, folders[name] / "adapter_model.safetensors")
    wrong = folders.pop("differ")
    with LLM(model, lora=folders) as llm:
        outputs = llm.generate([[3, 4]] * 4, GREEDY, lora_request=[None, *folders])
        assert_adapters(model, outputs, dict.fromkeys(folders, first))
        message = "'differ' has other weights for .*layers.1.* than for .*layers.0.*, which is the same module of Llama"
        with pytest.raises(ModelError, match=message):
            llm.engine.add_lora("differ", wrong)
        assert llm.engine.lora_names == list(folders)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_adapters_differ_from_one_another(tmp_path: Path) -> None:
    """Adapters generate different tokens; otherwise the law above could not fail."""
    model = served("llama")
    directories = write_three(model, "llama", tmp_path)
    with LLM(model, lora=directories, check_at_load=False) as llm:
        outputs = llm.generate([[5, 6, 7]] * 4, GREEDY, lora_request=[None, *directories])
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_an_adapter_of_the_output_head_changes_the_wanted_rows(tmp_path: Path) -> None:
    model = served("llama")
    directory = write_adapter(model, tmp_path / "head", r=4, target_modules=["lm_head", "q_proj"])
    prompts = make_prompts(9, VOCABULARY, 20)
    wanted = [None, "head", None] * 3
    with LLM(model, max_tokens_per_step=16, max_sequences=8, lora={"head": directory}) as llm:
        outputs = llm.generate(prompts, GREEDY.replace(prompt_logprobs=0), lora_request=wanted)
    assert_adapters(model, outputs, {"head": directory})


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"deterministic": False}, {"weights_tier": "disk"}])
def test_a_loaded_model_with_packed_weights_takes_adapters(settings: dict[str, Any], tmp_path: Path) -> None:
    """The packed model computes query, key and value projections in one product, and each layer adds its adapter."""
    model = served("llama")
    model.save_pretrained(tmp_path / "model")
    directories = write_three(model, "llama", tmp_path)
    prompts = make_prompts(12, VOCABULARY, 20)
    wanted = [[None, *directories][number % 4] for number in range(12)]
    found = []
    for sequences in (8, 1):
        options = {"max_tokens_per_step": 16, "max_sequences": sequences, **settings}
        with LLM(tmp_path / "model", skip_tokenizer_init=True, lora=directories, **options) as llm:
            outputs = llm.generate(prompts, GREEDY, lora_request=wanted)
        assert_adapters(model, outputs, directories)
        found.append([(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs])
    if settings.get("deterministic"):
        assert found[0] == found[1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_adapters_are_served_over_a_directory_of_four_bits(deterministic: bool, tmp_path: Path) -> None:
    model = served("llama")
    model.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32")
    directories = write_three(model, "llama", tmp_path)
    prompts = make_prompts(8, VOCABULARY, 20)
    wanted = [[None, *directories][number % 4] for number in range(8)]
    options = {"max_tokens_per_step": 16, "max_sequences": 8, "deterministic": deterministic, "activations": "float"}
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, lora=directories, **options) as llm:
        outputs = llm.generate(prompts, GREEDY, lora_request=wanted)
    assert_adapters(rounded(model, body("int4_g32")), outputs, directories)


def test_adapters_have_packed_products_beside_a_freed_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied embedding looks up rows of the packed head, and its own weight is freed, to the meta device."""
    monkeypatch.setattr(model_directory, "_MAPPED_BYTES", 1)
    model = build("llama", max_position_embeddings=96, tie_word_embeddings=True).eval()
    model.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g32")
    directory = write_adapter(model, tmp_path / "a", r=4, target_modules=["q_proj"])
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, lora={"a": directory}, check_at_load=False) as llm:
        runner = llm.engine.runner
        assert next(runner.model.parameters()).is_meta
        assert runner.lora is not None and runner.lora._packs == (get_inference_path().module is not None)


def test_training_goes_on_between_steps_of_a_served_module(tmp_path: Path) -> None:
    model = served("llama")
    directory = write_adapter(model, tmp_path / "a", r=4, target_modules=["q_proj"])
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = model(ids, labels=ids).loss.item()
    with LLM(model, lora={"a": directory}) as llm:
        llm.engine.add_request("0", [5, 6, 7], GREEDY, lora_name="a")
        llm.engine.step()
        loss = model(ids, labels=ids).loss
        assert loss.item() == wanted
        loss.backward()
        assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
        while llm.engine.has_requests():
            outputs = llm.engine.step()
    assert_greedy(reference(model, directory), outputs)


def test_a_name_that_is_loaded_again_has_a_cache_of_its_own(tmp_path: Path) -> None:
    model = served("llama")
    first = write_adapter(model, tmp_path / "1", 1, r=4, target_modules=["k_proj"])
    second = write_adapter(model, tmp_path / "2", 2, r=4, target_modules=["k_proj", "v_proj"])
    prompt = list(range(3, 40))
    with LLM(model) as llm:
        for directory in (first, second):
            llm.engine.add_lora("a", directory)
            assert llm.engine.lora_names == ["a"]
            assert_greedy(reference(model, directory), llm.generate(prompt, GREEDY, lora_request="a"))
            llm.engine.remove_lora("a")
        assert_greedy(model, llm.generate(prompt, GREEDY))
        with pytest.raises(RequestError, match="no adapter 'a'; loaded are none"):
            llm.generate(prompt, GREEDY, lora_request="a")


def test_an_adapter_in_use_cannot_be_removed(tmp_path: Path) -> None:
    model = served("llama")
    directory = write_adapter(model, tmp_path / "a", r=4, target_modules=["k_proj"])
    with LLM(model, lora={"a": directory}) as llm:
        llm.engine.add_request("0", [3, 4], GREEDY, lora_name="a")
        with pytest.raises(RequestError, match="1 unfinished requests use the adapter 'a'"):
            llm.engine.remove_lora("a")
        with pytest.raises(RequestError, match="'a' is loaded already"):
            llm.engine.add_lora("a", directory)
        with pytest.raises(RequestError, match="no adapter 'b'; loaded are a"):
            llm.engine.remove_lora("b")
        llm.engine.cancel("0")
        llm.engine.remove_lora("a")


def test_drafts_change_no_token_of_an_adapter(tmp_path: Path) -> None:
    model = served("llama")
    directories = write_three(model, "llama", tmp_path)
    speculative = {"method": "draft", "model": served("llama"), "num_tokens": 3}
    prompts, wanted = make_prompts(8, VOCABULARY, 12), [None, *directories] * 2
    with LLM(model, lora=directories, speculative=speculative) as llm:
        assert_adapters(model, llm.generate(prompts, GREEDY, lora_request=wanted), directories)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .'lm_head'."),
        ({"bias": "all"}, "bias is 'all'"),
        ({"target_modules": ["embed_tokens"]}, "a change of an embedding"),
    ],
)
def test_kinds_that_are_more_than_products_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = served("llama")
    directory = write_adapter(model, tmp_path / "a", **{"r": 4, "target_modules": ["q_proj"], **config})
    with pytest.raises(ModelError, match=message) as raised:
        LLM(model, lora={"a": directory}, check_at_load=False)
    assert "adapter 'a'" in str(raised.value)
    assert "merge" in str(raised.value)


def change_config(directory: Path, **values: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_damaged_adapters_are_refused_by_name(tmp_path: Path) -> None:
    model = served("llama")
    good = write_adapter(model, tmp_path / "good", r=4, target_modules=["q_proj"])
    weights = load_file(good / "adapter_model.safetensors")
    some = next(key for key in weights if key.endswith("lora_B.weight"))

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    def with_weights(name: str, tensors: dict[str, torch.Tensor]) -> Path:
        save_file(tensors, damaged(name) / "adapter_model.safetensors")
        return tmp_path / name

    (damaged("no_config") / "adapter_config.json").unlink()
    (damaged("no_weights") / "adapter_model.safetensors").unlink()
    (damaged("broken_json") / "adapter_config.json").write_text("{")
    (damaged("short") / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    change_config(damaged("kind"), peft_type="IA3")
    change_config(damaged("rank"), r=5)
    change_config(damaged("half_rank"), r=4.5)
    change_config(damaged("negative"), rank_pattern={"alpha": -4})
    change_config(damaged("alpha"), lora_alpha="much")
    change_config(damaged("alphas"), alpha_pattern={"q_proj": None})
    change_config(damaged("pattern"), rank_pattern={"(": 3})
    change_config(damaged("pissa"), init_lora_weights="pissa_niter_4")
    change_config(damaged("bias"), lora_bias=True)
    change_config(damaged("new"), sets_later=[1])
    with_weights("base", {**weights, "base_model.model.lm_head.base_layer.weight": torch.zeros(41, 32)})
    with_weights("half", {key: tensor for key, tensor in weights.items() if key != some})
    with_weights("wide", {key: torch.zeros(99, 4) if key == some else tensor for key, tensor in weights.items()})
    with_weights("elsewhere", {key.replace("layers.0", "layers.7"): tensor for key, tensor in weights.items()})
    with_weights("empty", {})
    messages = {
        "missing": "no adapter_config.json",
        "no_config": "no adapter_config.json",
        "no_weights": "no adapter_model.safetensors; pickled adapters are not read",
        "broken_json": "adapter_config.json cannot be read",
        "short": "adapter_model.safetensors cannot be read",
        "kind": "peft_type is 'IA3'",
        "rank": "a rank of 5",
        "half_rank": "r is 4.5; write a positive integer",
        "negative": "rank_pattern.alpha. is -4; write a positive integer",
        "alpha": "lora_alpha is 'much'; write a number",
        "alphas": "alpha_pattern.q_proj. is None; write a number",
        "pattern": "not a regular expression",
        "pissa": "belongs to other base weights",
        "bias": "lora_bias is True, which is not served; merge",
        "new": "sets_later is .1., which is not served; merge",
        "base": "lm_head.base_layer.weight'; this is a copy of a base weight, .* save_embedding_layers=False",
        "half": "lacks lora_B of model.layers",
        "wide": "from 32 to 99 features, and the layer of LlamaForCausalLM has 32 and 32",
        "elsewhere": "model.layers.7.self_attn.q_proj, and LlamaForCausalLM has no such module",
        "empty": "has no tensors",
    }
    with LLM(model, check_at_load=False) as llm:
        for name, message in messages.items():
            with pytest.raises(ModelError, match=message) as raised:
                llm.engine.add_lora(name, tmp_path / name)
            assert repr(name) in str(raised.value)
        assert llm.engine.lora_names == []
        assert_greedy(model, llm.generate([[3, 4]], GREEDY))


def test_adapters_and_stages_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="pp is 2, but adapters are not served over pp; merge the adapter"):
        LLM("nowhere", lora={"a": "b"}, pp=2)


def test_steps_are_recorded_while_no_adapter_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served("llama").save_pretrained(tmp_path / "model")
    directory = write_adapter(served("llama"), tmp_path / "a", r=4, target_modules=["k_proj"])
    with LLM(tmp_path / "model", skip_tokenizer_init=True) as llm:
        runner: Any = llm.engine.runner
        assert runner.program is not None
        replays, run = 0, runner.program.run

        def counted(batch: Any) -> torch.Tensor:
            nonlocal replays
            replays += 1
            return run(batch)

        monkeypatch.setattr(runner.program, "run", counted)
        for loaded in (False, True, False):
            if loaded:
                llm.engine.add_lora("a", directory)
            before = replays
            llm.generate([[3, 4]], GREEDY)
            assert (replays > before) != loaded
            if loaded:
                llm.engine.remove_lora("a")
