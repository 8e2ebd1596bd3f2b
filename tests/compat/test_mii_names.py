"""Law: MII's functions return the texts of windlass's engine, with MII's settings and defaults."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.causal_models import build
from windlass import LLM, SamplingParams
from windlass.base.errors import ConfigError, RequestError
from windlass.compat.mii_deployment import MiiClient, _deployments, client, serve
from windlass.compat.mii_pipeline import engine_arguments, make_sampling_params, pipeline, use_engine_config
from windlass.config.inference_section import RaggedInference, RaggedTensorParallel, StateManager
from windlass.inference.async_engine import EngineStoppedError

PROMPTS = ["ab cd", "cd"]
SMALL = {"kv_cache_tokens": 512, "max_tokens_per_step": 64, "max_sequences": 8}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model with a tokenizer of letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("mii") / "tiny"
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, **{c: i + 4 for i, c in enumerate(letters)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(path)
    build("llama", max_position_embeddings=96, vocab_size=30).save_pretrained(path)
    return path


def plain_texts(directory: Path) -> list[str]:
    with LLM(directory, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        return [output.outputs[0].text for output in outputs]


def test_a_pipeline_answers_with_text_and_lengths(directory: Path) -> None:
    expected = plain_texts(directory)
    pipe = pipeline(str(directory), **SMALL)
    actual = pipe(PROMPTS, max_new_tokens=6, do_sample=False, ignore_eos=True)
    assert [str(item) for item in actual] == expected
    assert [(item.prompt_length, item.generated_length, item.finish_reason) for item in actual] == [
        (4, 6, "length"),
        (2, 6, "length"),
    ]
    assert repr(actual) == f"[{', '.join(expected)}]"
    (full,) = pipe(PROMPTS[0], max_new_tokens=6, do_sample=False, ignore_eos=True, return_full_text=True)
    assert full.generated_text == PROMPTS[0] + expected[0]
    assert pipe.is_rank_0
    with pytest.raises(ConfigError, match="no setting 'stream'"):
        pipe(PROMPTS, stream=True)
    pipe.destroy()


def test_settings_of_a_pipeline_come_as_a_dict_too(directory: Path) -> None:
    given = {"model_name_or_path": str(directory), "max_length": 8, "torch_dist_port": 29501}
    pipe = pipeline(model_config=given, **SMALL)
    (found,) = pipe(PROMPTS[0], ignore_eos=True)
    assert (found.prompt_length, found.generated_length) == (4, 4)  # the length counts the prompt too
    pipe.destroy()
    with pytest.raises(ConfigError, match="max_length is 9, and 8 in model_config"):
        pipeline(model_config=given, max_length=9)
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="model_name_or_path is 'x' in the settings, and a Linear was"):
        pipeline(module, {"model_name_or_path": "x"})
    with pytest.raises(ConfigError, match="model_name_or_path is empty"):
        pipeline(model_config={"max_length": 8})


def test_a_deployment_answers_threads_and_streams(directory: Path) -> None:
    expected = plain_texts(directory)
    deployment = serve(str(directory), deployment_name="tiny", **SMALL)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "ignore_eos": True}
    answers: dict[int, list[Any]] = {}

    def ask(number: int) -> None:
        answers[number] = client("tiny").generate(PROMPTS, **settings)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[item.generated_text for item in answers[number]] for number in range(4)] == [expected] * 4
    parts: list[str] = []
    assert deployment.generate(PROMPTS[0], lambda new: parts.append(new[0].generated_text), **settings) is None
    assert "".join(parts) == expected[0]
    with pytest.raises(ConfigError, match="runs already"):
        serve(str(directory), deployment_name="tiny")
    deployment.terminate_server()
    with pytest.raises(ConfigError, match="no deployment 'tiny'"):
        client("tiny")
    with pytest.raises(ConfigError, match="'tiny' was terminated"):
        deployment.generate(PROMPTS)


def test_a_fork_cannot_call_a_deployment(directory: Path) -> None:
    """The threads of the engine stay in the process that started it; a call in a fork would wait for them forever."""
    deployment = serve(str(directory), deployment_name="forked", **SMALL)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            client("forked").generate(PROMPTS, max_new_tokens=2)
        except BaseException as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reading, 1000).decode()
    assert f"'forked' runs in process {os.getpid()}, but was called in its fork {child}; call it from threads" in found
    deployment.terminate_server()


def test_a_deployment_is_found_by_its_model_and_its_callbacks_may_call_it(directory: Path) -> None:
    expected = plain_texts(directory)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "ignore_eos": True}
    deployment = serve(str(directory), {"max_length": 90}, {"port_number": 50050}, **SMALL)
    assert client(str(directory)) is deployment
    inside: list[Any] = []
    deployment.generate(
        PROMPTS[0], lambda _: inside or inside.append(deployment.generate(PROMPTS, **settings)), **settings
    )
    assert [item.generated_text for item in inside[0]] == expected

    def fail(_: Any) -> None:
        raise KeyError("of the callback")

    with pytest.raises(KeyError, match="of the callback"):
        deployment.generate(PROMPTS[0], fail, max_new_tokens=80, ignore_eos=True)
    with pytest.raises(RequestError, match="a prompt has 120 tokens"):
        deployment.generate([PROMPTS[0], "a" * 120], **settings)
    deployment.generate(PROMPTS, **settings)  # queued behind the cancellation, so the engine has handled both
    assert deployment._engine.stats().num_running == 0
    deployment.terminate_server()


def test_every_call_ends_before_its_deployment() -> None:
    begun, stopped = threading.Event(), asyncio.Event()

    class SlowlyStopping:
        """Engine whose streams end some time after the engine was shut down."""

        max_model_len, tokenizer = 100, staticmethod(lambda prompt: SimpleNamespace(input_ids=[1]))

        async def start(self) -> None: ...

        async def shutdown(self) -> None:
            stopped.set()

        async def stream(self, prompt: str, params: SamplingParams) -> AsyncIterator[Any]:
            begun.set()
            await stopped.wait()
            await asyncio.sleep(0.2)
            raise EngineStoppedError("it was shut down")
            yield

    deployment = _deployments["slow"] = MiiClient("slow", SlowlyStopping())  # type: ignore[arg-type]
    errors: list[BaseException] = []

    def call() -> None:
        try:
            deployment(["a", "b"])
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert begun.wait(30)
    deployment.terminate_server()
    caller.join(5)
    assert [type(error) for error in errors] == [EngineStoppedError]


def test_calls_end_where_the_shutdown_fails() -> None:
    begun = threading.Event()

    class Failing:
        """Engine whose streams never end, and whose shutdown fails."""

        max_model_len, tokenizer = 100, staticmethod(lambda prompt: SimpleNamespace(input_ids=[1]))

        async def start(self) -> None: ...

        async def shutdown(self) -> None:
            raise RuntimeError("of the shutdown")

        async def stream(self, prompt: str, params: SamplingParams) -> AsyncIterator[Any]:
            begun.set()
            await asyncio.sleep(3600)
            yield

    deployment = _deployments["failing"] = MiiClient("failing", Failing())  # type: ignore[arg-type]
    errors: list[BaseException] = []

    def call() -> None:
        try:
            deployment("a")
        except BaseException as error:
            errors.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert begun.wait(30)
    with pytest.raises(RuntimeError, match="of the shutdown"):
        deployment.terminate_server()
    caller.join(5)
    assert not caller.is_alive()
    assert len(errors) == 1


def test_an_old_client_does_not_end_the_deployment_that_has_its_name_now() -> None:
    class Idle:
        """Engine whose shutdown may fail."""

        fails = False

        async def start(self) -> None: ...

        async def shutdown(self) -> None:
            if self.fails:
                raise RuntimeError("of the shutdown")

    old = _deployments["again"] = MiiClient("again", Idle())  # type: ignore[arg-type]
    old.terminate_server()
    new = _deployments["again"] = MiiClient("again", Idle())  # type: ignore[arg-type]
    old.terminate_server()
    assert client("again") is new
    new._engine.fails = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="of the shutdown"):
        new.terminate_server()
    assert "again" not in _deployments
    assert new._loop.is_closed()


def test_defaults_are_those_of_mii(directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    (params,) = make_sampling_params(tokenizer, ["abc"], 96)
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 0.9, 93)
    (params,) = make_sampling_params(tokenizer, ["abc"], 96, max_length=10, max_new_tokens=20)
    assert params.max_tokens == 7  # max_length less 3 prompt tokens is smaller than max_new_tokens


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel": 2}, "windlass serve"),
        ({"enable_restful_api": True}, "OpenAI's API"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"inference_engine_config": {"tensor_parallel": {"tp_size": 2}}}, "windlass serve"),
        ({"inference_engine_config": {"state_manager": {"offload": True}}}, "swap_bytes"),
        ({"inference_engine_config": {"manager": {"max_ragged_batch_size": 8}}}, "write at most that"),
        ({"inference_engine_config": {"rows": 1}}, "rows"),
        (
            {"inference_engine_config": {"manager": {"max_ragged_batch_size": 768}}, "max_tokens_per_step": 64},
            "max_tokens_per_step is 64, and 768 in inference_engine_config",
        ),
    ],
)
def test_deployments_that_one_process_cannot_be_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        serve("missing", **settings)


def test_limits_of_a_ragged_engine_become_options_of_the_engine(directory: Path) -> None:
    """A deployment starts with the engine configuration of DeepSpeed's FastGen benchmark."""
    manager = StateManager(
        max_ragged_batch_size=48, max_ragged_sequence_count=4, memory_config={"mode": "allocate", "size": 3}
    )
    config = RaggedInference(tensor_parallel=RaggedTensorParallel(tp_size=1), state_manager=manager)
    settings: dict[str, Any] = {"tensor_parallel": 1, "inference_engine_config": config}
    use_engine_config(settings)
    assert engine_arguments(settings) == {
        "tp": 1, "max_model_len": None, "max_tokens_per_step": 48, "max_sequences": 4, "kv_cache_tokens": 192,
    }  # fmt: skip
    answers = serve(str(directory), deployment_name="ragged", inference_engine_config=config)
    try:
        actual = answers(PROMPTS, max_new_tokens=6, do_sample=False, ignore_eos=True)
        assert [item.generated_text for item in actual] == plain_texts(directory)
    finally:
        answers.terminate_server()
