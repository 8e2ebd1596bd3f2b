"""Law: an engine over several ranks generates what the plain model does, and all ranks get the same outputs."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.causal_models import CAUSAL, VOCABULARY, build_longer
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares
from tests.inference.greedy_reference import assert_greedy, make_prompts, round_layers
from tests.inference.peft_adapters import ATTENTION, assert_adapters, write_adapter, write_three
from tests.inference.test_family_products import (
    BUDGETS,
    FAMILIES,
    POLICIES,
    REST,
    Options,
    answer,
    compare,
    family,
    write_adapters,
)
from tests.registered_formats import registered
from windlass.base.errors import CommunicationError, ConfigError, ModelError, PeerError, RequestError
from windlass.inference.paged_runner import PagedModelRunner
from windlass.kernels.weight_format import get_weight_format

GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 0}
SMALL = {"max_tokens_per_step": 16, "max_sequences": 6, "kv_cache_tokens": 112, "max_model_len": 80}


def generate_everywhere(names: list[str], axes: dict[str, int], options: dict[str, Any]) -> list[Any]:
    """Return the greedy answers of each model. Ranks start from different weights; only the first has prompts."""
    from windlass import LLM, SamplingParams

    rank = dist.get_rank()
    results = []
    for name in names:
        with LLM(build_longer(name, seed=rank), **axes, **{**SMALL, **options}) as llm:
            prompts = make_prompts(8, VOCABULARY, 40, shared=18) if rank == 0 else []
            outputs = llm.generate(prompts, SamplingParams(**GREEDY))
            stats = llm.stats()
            assert stats.kv_cache_usage == 0, "blocks leaked"
            results.append((outputs, stats.num_preemptions, stats.prefix_cache_hits))
    return results


def assert_same(results: list[Any], names: list[str]) -> list[Any]:
    for other in results[1:]:
        for (outputs, *_), (others, *_) in zip(results[0], other, strict=True):
            assert [item.outputs[0].token_ids for item in outputs] == [item.outputs[0].token_ids for item in others]
    for name, (outputs, *_) in zip(names, results[0], strict=True):
        assert_greedy(build_longer(name), outputs)
    return results[0]


def broadcast_single_values() -> list[float]:
    """Broadcast parameters of one element whose stride is not 1, and return the values."""
    from windlass.inference.rank_channel import open_channel

    model = nn.ParameterList(nn.Parameter(torch.full((5,), dist.get_rank() + at)[::5]) for at in (1.0, 2.5))
    assert all(one.stride() == (5,) for one in model)
    channel = open_channel(tp=2, ep=1)
    channel.broadcast_model(model)
    channel.close_with_engine(keeps_axes=False)
    channel.end()
    return [float(one) for one in model]


def test_parameters_of_one_element_with_any_stride_reach_all_ranks() -> None:
    assert run_ranks(broadcast_single_values, 2) == [[1.0, 2.5]] * 2


def test_tensor_parallel_ranks_generate_what_the_plain_model_does() -> None:
    names = ["llama", "bloom"]  # slow tests cover each family
    result = assert_same(run_ranks(generate_everywhere, 2, names, {"tp": 2}, {}, timeout=300), names)
    paged = result[:-1]
    assert all(preempted > 0 and hits > 0 for _, preempted, hits in paged)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_each_family_on_tensor_parallel_ranks(name: str) -> None:
    assert_same(run_ranks(generate_everywhere, 2, [name], {"tp": 2}, {}, timeout=300), [name])


def answer_combinations(name: str, chosen: list[Options], directories: dict[str, Path]) -> list[Any]:
    return [answer(name, family(name), directories, options, 40, seed, tp=2) for seed, options in enumerate(chosen)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("name", FAMILIES[:-1])  # the last family has a fused projection, which is refused
def test_random_arrivals_on_tensor_parallel_ranks(name: str, tmp_path: Path) -> None:
    """Six combinations of options answer forty requests each. The name is the seed of the combinations."""
    r, model = random.Random(name), family(name)
    chosen = [Options(r.choice(POLICIES), r.choice(BUDGETS), *rest) for rest in r.sample(REST, 6)]
    directories = write_adapters(model, name, tmp_path)
    found = run_ranks(answer_combinations, 2, name, chosen, directories, timeout=600)[0]
    for options, outputs in zip(chosen, found, strict=True):
        compare(model, directories, options, outputs)


@pytest.mark.parametrize("options", [{"swap_bytes": 1 << 24}, {"speculative": {"method": "ngram"}}])
def test_options_of_the_engine_on_tensor_parallel_ranks(options: dict[str, Any]) -> None:
    assert_same(run_ranks(generate_everywhere, 2, ["llama"], {"tp": 2}, options), ["llama"])


def generate_from_directory(directory: str, weights: str | None, kernels: str) -> tuple[list[Any], list[str]]:
    """Return the answers, and the names of linear layers whose weights were not packed."""
    from windlass import LLM, SamplingParams

    chosen = patch.dict(os.environ, {"WINDLASS_KERNELS": kernels})
    with chosen, LLM(directory, tp=2, weights=weights, skip_tokenizer_init=True, **SMALL) as llm:
        runner = llm.engine.runner
        runner = getattr(runner, "local_runner", runner)
        assert isinstance(runner, PagedModelRunner)
        layers = [(name, one) for name, one in runner.model.named_modules() if type(one) in (nn.Linear, Conv1D)]
        outputs = llm.generate(make_prompts(6, VOCABULARY, 40), SamplingParams(**GREEDY))
        return outputs, [name for name, one in layers if not one.weight.is_meta]


@pytest.mark.parametrize(
    ("name", "weights", "kernels"), [("llama", None, ""), ("gpt2", "int8", ""), ("llama", "int8", "reference")]
)
def test_loaded_models_pack_their_shards(tmp_path: Path, name: str, weights: str | None, kernels: str) -> None:
    """A rank's part of a matrix is packed to the same codes and scales as in the full matrix."""
    model = build_longer(name)
    model.save_pretrained(tmp_path)
    found = run_ranks(generate_from_directory, 2, str(tmp_path), weights, kernels, timeout=240)
    first, second = (outputs for outputs, _ in found)
    assert [item.outputs[0].token_ids for item in first] == [item.outputs[0].token_ids for item in second]
    if weights is not None:
        assert [plain for _, plain in found] == [[], []]
        round_layers(model, weights)
    assert_greedy(model, first, 1e-4)


def generate_with_registered_formats(directory: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the answers by format."""
    with registered():
        return {name: generate_from_directory(directory, name, "")[0] for name in names}


@in_shares
def test_registered_formats_are_divided_among_ranks(every: bool, tmp_path: Path) -> None:
    """A rank's part of a matrix is packed to the codes of the full matrix. Only the head is rounded by part."""
    build_longer("llama").save_pretrained(tmp_path)
    names = ("my4", "my8", "my8_rows") if every else ("my4", "my8_rows")
    found, other = run_ranks(generate_with_registered_formats, 2, str(tmp_path), names, timeout=240)
    for weights, outputs in found.items():
        assert [item.outputs[0].token_ids for item in outputs] == [item.outputs[0].token_ids for item in other[weights]]
        model = build_longer("llama")
        with registered(), torch.no_grad():
            halves = [half.clone() for half in model.lm_head.weight.split(-(-VOCABULARY // 2))]
            round_layers(model, weights)
            form = get_weight_format(weights)
            model.lm_head.weight.copy_(torch.cat([form.unpack(form.pack(half)) for half in halves]))
        assert_greedy(model, outputs)


BERT = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def prepared_in_int8(kernels: str) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import BertConfig, BertModel

    from windlass import init_inference

    ids = torch.arange(3, 15)[None]
    bert = BertConfig(**BERT)
    with patch.dict(os.environ, {"WINDLASS_KERNELS": kernels}):
        engine = init_inference(build_longer("llama"), tp=2, weights="int8", **SMALL)
        tokens = engine.generate(ids, max_new_tokens=8, pad_token_id=0)
        torch.manual_seed(0)
        return tokens, init_inference(BertModel(bert), tp=2, weights="int8")(ids)[0]


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_init_inference_packs_the_parts_of_ranks(kernels: str) -> None:
    from transformers import BertConfig, BertModel

    model, ids = build_longer("llama").eval(), torch.arange(3, 15)[None]
    torch.manual_seed(0)
    bert = BertModel(BertConfig(**BERT)).eval()
    for one in (model, bert):
        round_layers(one, "int8")
    for tokens, hidden in run_ranks(prepared_in_int8, 2, kernels):
        assert torch.equal(tokens, model.generate(ids, max_new_tokens=8, pad_token_id=0))
        torch.testing.assert_close(hidden, bert(ids)[0], rtol=1e-3, atol=1e-4)


def answers_before_and_after_a_write(axis: str) -> list[torch.Tensor]:
    from windlass import init_inference

    ids = torch.arange(3, 38)[None]
    axes: dict[str, Any] = {axis: 2}
    engine = init_inference(build_longer("llama"), **axes, **SMALL)
    tokens = [engine.generate(ids, max_new_tokens=8, pad_token_id=0)]
    for name, parameter in engine.module.named_parameters():
        if "layers.0." in name:  # with pp the other rank has no such parameter
            parameter.data.mul_(-2)  # leaves the parameter's version as it is
    tokens.append(engine.generate(ids, max_new_tokens=8, pad_token_id=0))
    return tokens


def test_weights_that_a_script_writes_are_followed_on_several_ranks() -> None:
    """The prefix cache still has keys and values of the former weights, which must not be used."""
    model, ids = build_longer("llama").eval(), torch.arange(3, 38)[None]
    expected = [model.generate(ids, max_new_tokens=8, pad_token_id=0)]
    for name, parameter in model.named_parameters():
        if "layers.0." in name:
            parameter.data.mul_(-2)
    expected.append(model.generate(ids, max_new_tokens=8, pad_token_id=0))
    for axis in ("tp", "pp"):
        for tokens in run_ranks(answers_before_and_after_a_write, 2, axis):
            assert torch.equal(tokens[0], expected[0]) and torch.equal(tokens[1], expected[1]), axis


def loaded_from_checkpoints(directory: str) -> list[torch.Tensor]:
    import windlass
    from windlass.compat.inference_engine import init_inference
    from windlass.compat.on_device import OnDevice

    config = {"train_batch_size": 2, "zero_optimization": {"stage": 2}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    files = {"type": "ds_model", "checkpoints": ["model.safetensors"], "version": 1.0}
    given: list[dict[str, Any]] = [{"checkpoint": files, "base_dir": f"{directory}/model"}]
    for form in ("windlass", "deepspeed"):
        trained = windlass.initialize(model=build_longer("llama"), config={**config, "checkpoint": {"format": form}})[0]
        trained.save_checkpoint(f"{directory}/{form}")
        trained.destroy()
        given.append({"checkpoint": f"{directory}/{form}"})
    tokens = []
    for one in given:
        with OnDevice(torch.float32, device="meta"):
            empty = build_longer("llama")
        engine = init_inference(empty, dtype="fp32", tensor_parallel={"tp_size": 2}, **one)
        assert empty.model.layers[0].mlp.up_proj.weight.shape == (24, 32)
        tokens.append(engine.generate(torch.arange(3, 15)[None], max_new_tokens=8, pad_token_id=0))
        engine.destroy()
    return tokens


def test_init_inference_shards_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """The checkpoint is a list of files, or a training engine's in either format."""
    model = build_longer("llama")
    model.save_pretrained(tmp_path / "model")
    expected = model.generate(torch.arange(3, 15)[None], max_new_tokens=8, pad_token_id=0)
    for tokens in run_ranks(loaded_from_checkpoints, 2, str(tmp_path)):
        assert len(tokens) == 3 and all(torch.equal(one, expected) for one in tokens)


@pytest.mark.slow  # the next test combines this axis with another
def test_expert_parallel_ranks_generate_what_the_plain_model_does() -> None:
    assert_same(run_ranks(generate_everywhere, 2, ["mixtral"], {"ep": 2}, {}), ["mixtral"])


@pytest.mark.slow  # Other tests cover each axis on two ranks.
def test_experts_and_matrices_over_four_ranks() -> None:
    assert_same(run_ranks(generate_everywhere, 4, ["mixtral"], {"ep": 2, "tp": 2}, {}), ["mixtral"])


def two_models_over_four_ranks() -> list[int]:
    from windlass import LLM, SamplingParams

    with LLM(build_longer("llama"), tp=2, **SMALL) as llm:
        prompt = [3 + dist.get_rank() // 2, 5, 7]
        (output,) = llm.generate([prompt], SamplingParams(**GREEDY))
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


def test_two_tp_groups_serve_their_own_prompts() -> None:
    result = run_ranks(two_models_over_four_ranks, 4)
    assert result[0] == result[1]
    assert result[2] == result[3]
    assert [item[:3] for item in result[::2]] == [[3, 5, 7], [4, 5, 7]]


def refused_then_served() -> tuple[str, int]:
    from windlass import LLM, SamplingParams

    with LLM(build_longer("llama"), tp=2, **SMALL) as llm:
        try:
            llm.generate([[VOCABULARY + 1]], SamplingParams(**GREEDY))
        except RequestError as error:
            text = str(error)
        return text, len(llm.generate([[3, 4]], SamplingParams(**GREEDY))[0].outputs[0].token_ids)


def test_a_refused_request_raises_on_all_ranks_and_others_go_on() -> None:
    first, second = run_ranks(refused_then_served, 2)
    assert first == second
    assert "not in the vocabulary" in first[0]
    assert first[1] == 20


def groups_after_engines(directory: str) -> tuple[list[int], list[str]]:
    """Return the number of process groups after each of several engines, and errors of calls of closed engines."""
    from torch.distributed.distributed_c10d import _world

    from windlass import LLM, SamplingParams

    counts, errors = [], []
    live = build_longer("llama")
    for model in (directory, directory, live, live):
        with LLM(model, tp=2, skip_tokenizer_init=True, **SMALL) as llm:
            llm.generate([[3, 4]], SamplingParams(**GREEDY))
        counts.append(len(_world.pg_map))
        try:
            llm.generate([[3, 4]], SamplingParams(**GREEDY))
        except (CommunicationError, RequestError) as error:
            errors.append(str(error))
    live(torch.tensor([[3, 4]]))  # sharded by the engines, its layers still communicate
    return counts, errors


def test_closed_engines_leave_no_process_groups(tmp_path: Path) -> None:
    build_longer("llama").save_pretrained(tmp_path)
    for counts, errors in run_ranks(groups_after_engines, 2, str(tmp_path)):
        assert counts[0] == counts[1] and counts[2] == counts[3] == counts[0] + 1
        assert len(errors) == 4 and all("is closed" in text for text in errors)


def failing_rank(axis: str, rank: int) -> tuple[str, str]:
    """Raise in one layer on `rank`, while the other rank waits in a collective or for hidden states."""
    from windlass import LLM, SamplingParams

    llm = LLM(build_longer("llama"), **{axis: 2}, **SMALL)
    if dist.get_rank() == rank:

        def fail(*args: Any) -> None:
            raise MemoryError("planted")

        layer = 1 - rank if axis == "pp" else 1  # the first rank has the last stage
        llm.engine.runner.model.model.layers[layer].register_forward_pre_hook(fail)
    with pytest.raises((PeerError, MemoryError)) as error:
        llm.generate([[3, 4, 5], [6, 7]], SamplingParams(**GREEDY))
    with pytest.raises(CommunicationError):
        llm.generate([[3]], SamplingParams(**GREEDY))
    llm.close()
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_reaches_all(axis: str, rank: int) -> None:
    result = run_ranks(failing_rank, 2, axis, rank)
    assert result[rank] == ("MemoryError", "planted")
    kind, text = result[1 - rank]
    assert kind == "PeerError"
    assert f"rank {rank} of the inference ranks failed: MemoryError: planted" in text


def serve_on_first_rank(axis: str) -> list[list[int]] | str:
    """Run an asyncio engine on the first rank: answers, concurrent embeddings, and cancelled requests."""
    import asyncio

    from windlass.inference.async_engine import AsyncLLMEngine
    from windlass.inference.sampling_params import SamplingParams
    from windlass.inference.worker_loop import run_worker

    if dist.get_rank() > 0:
        run_worker(build_longer("llama"), **{axis: 2}, **SMALL)
        return "ended"

    async def serve() -> list[list[int]]:
        engine = AsyncLLMEngine.from_model(build_longer("llama"), **{axis: 2}, **SMALL)
        await engine.start()

        async def ask(number: int, prompt: list[int]) -> list[int]:
            async for output in engine.stream(prompt, SamplingParams(**GREEDY), request_id=str(number)):
                last = output
                if number % 3 == 2:
                    break  # closes the stream, which cancels the request
            return list(last.outputs[0].token_ids)

        prompts = make_prompts(9, VOCABULARY, 20)
        asked = asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
        embeddings = [(await engine.embed([prompt]))[0] for prompt in prompts[:3]]
        found = await asked
        assert all(len(one) == 32 for one in embeddings)
        while engine.stats().num_running or engine.stats().kv_cache_usage:
            await asyncio.sleep(0.01)
        await engine.shutdown()
        return [answer for number, answer in enumerate(found) if number % 3 != 2]

    return asyncio.run(serve())


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_an_asyncio_engine_on_the_first_rank_runs_workers_on_the_others(axis: str) -> None:
    from windlass import LLM, SamplingParams

    answers, ended = run_ranks(serve_on_first_rank, 2, axis)
    assert ended == "ended"
    prompts = [prompt for number, prompt in enumerate(make_prompts(9, VOCABULARY, 20)) if number % 3 != 2]
    with LLM(build_longer("llama"), **SMALL) as llm:
        outputs = llm.generate(prompts, SamplingParams(**GREEDY))
    assert answers == [list(one.outputs[0].token_ids) for one in outputs]


def wrong_world() -> str:
    from windlass import LLM

    with pytest.raises(ConfigError, match=r"needs a multiple of 3 ranks, and 2 run") as error:
        LLM(build_longer("llama"), tp=3)
    return str(error.value)


def test_too_few_ranks_are_an_error() -> None:
    assert "windlass run --nproc 3" in run_ranks(wrong_world, 2)[0]


def test_messages_of_batches_round_trip() -> None:
    from windlass.inference.step_batch import StepBatch
    from windlass.inference.step_message import decode_batch, encode_batch

    batch = StepBatch(
        torch.arange(5),
        torch.arange(5) + 3,
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.tensor([5, 8], dtype=torch.int32),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.arange(5) * 2,
        torch.tensor([1, 4]),
        [7, 9],
        [None, None],
    )
    found = decode_batch(encode_batch(batch))
    for name in batch.values._fields:
        value, other = getattr(batch, name), getattr(found, name)
        assert torch.equal(value, other), name
        assert value.dtype == other.dtype, name
    assert found.sequence_ids == batch.sequence_ids
    assert found.adapters == batch.adapters


def generate_with_adapters(
    name: str, files: Path | None, directories: dict[str, Path], more: dict[str, Path], axes: dict[str, int]
) -> list[Any]:
    """Return greedy answers with adapters given at the start and, on the first rank, by `add_lora`.

    Args:
        files: directory from which the model is loaded; None: the model is built.
    """
    from windlass import LLM, SamplingParams

    rank = dist.get_rank()
    model = build_longer(name, seed=rank) if files is None else files
    options = {**SMALL, "max_model_len": 48, "skip_tokenizer_init": True}
    with LLM(model, **axes, **options, lora=directories) as llm:
        prompts = make_prompts(12, VOCABULARY, 7, shared=18) if rank == 0 else []
        names = [None, *directories, *more]
        wanted = [names[number // 2 % len(names)] for number in range(len(prompts))]
        if rank == 0:
            with pytest.raises(ModelError, match="it was trained for another model"):
                llm.engine.add_lora("wrong", next(iter(directories.values())).parent / "wrong")
            for adapter, directory in more.items():
                llm.engine.add_lora(adapter, directory)
        outputs = llm.generate(prompts, SamplingParams(**{**GREEDY, "max_tokens": 6}), lora_request=wanted or None)
        removed = next(iter(more))
        if rank == 0:
            llm.engine.remove_lora(removed)
        with pytest.raises(RequestError, match="there is no adapter"):
            llm.generate(prompts[:1], lora_request=removed if rank == 0 else None)
        return outputs


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "ranks", "loads"),
    [
        ("llama", 2, True),
        ("gpt2", 2, False),
        *(
            pytest.param(name, ranks, loads, marks=pytest.mark.slow)
            for name in ATTENTION
            for ranks in (2, 4)
            for loads in (False, True)
            if name != "gpt2" or ranks == 2  # gpt2 has three heads, too few for four ranks
        ),
    ],
)
def test_adapters_on_tensor_parallel_ranks(name: str, ranks: int, loads: bool, tmp_path: Path) -> None:
    model = build_longer(name).eval()
    files = tmp_path / "model" if loads else None
    if files is not None:
        model.save_pretrained(files)
    found = write_three(model, name, tmp_path)
    other = build_longer(name, **({"n_embd": 48} if name == "gpt2" else {"hidden_size": 64})).eval()
    write_adapter(other, tmp_path / "wrong", target_modules=ATTENTION[name], fan_in_fan_out=name == "gpt2")
    if name == "llama":
        found["head"] = write_adapter(model, tmp_path / "head", 7, target_modules=["lm_head", "v_proj"])
    more = {"patterns": found.pop("patterns")}
    results = run_ranks(generate_with_adapters, ranks, name, files, found, more, {"tp": ranks}, timeout=240)
    for outputs in results[1:]:
        assert [item.outputs[0].token_ids for item in outputs] == [item.outputs[0].token_ids for item in results[0]]
    assert_adapters(model, results[0], {**found, **more})
