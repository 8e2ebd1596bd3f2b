"""Tests of answers: text, stop conditions, several answers per prompt, log-probabilities, and beam search."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.causal_models import VOCABULARY, build
from tests.inference.greedy_reference import make_prompts
from tests.inference.text_models import END, TEXT, byte_level_tokenizer, sentencepiece_tokenizer, text_model
from windlass.base.errors import ConfigError, EngineOverloadedError, ModelError, RequestError
from windlass.base.model_updates import note_update
from windlass.inference import embeddings
from windlass.inference.chat_template import ContentForm, read_forms
from windlass.inference.detokenizer import Detokenizer, TextDecoder, held_back, text_offsets
from windlass.inference.llm import LLM
from windlass.inference.model_loading import count_embeddings
from windlass.inference.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from windlass.inference.sequence_table import count_candidates

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}


def llama(**changes: Any) -> Any:
    return build("llama", **{"max_position_embeddings": 96, **changes}).eval()


def serve(model: Any, **options: Any) -> LLM:
    return LLM(model, **{"check_at_load": False, "max_tokens_per_step": 32, "max_sequences": 8, **options})


def test_engines_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def sized(engines: int) -> int:
        with serve(llama(), host_engines=engines) as llm:
            return llm.stats().kv_blocks

    monkeypatch.setattr("windlass.inference.runner_factory.available_memory", lambda ranks: 2**17 // ranks)
    assert sized(4) == sized(1) // 4 > 0


def stream(llm: LLM, prompt: Any, params: SamplingParams) -> list[Any]:
    llm.engine.add_request("stream", prompt, params, streams=True)
    outputs = []
    while llm.engine.has_requests():
        outputs += llm.engine.step()
    return outputs


def test_a_cache_that_is_too_small_for_one_request_says_what_to_change() -> None:
    message = r"the KV cache holds 32 tokens, fewer than max_model_len \(96\); raise kv_cache_tokens or lower max_model"
    with pytest.raises(ConfigError, match=message):
        serve(llama(), kv_cache_tokens=32, max_model_len=96)
    with serve(llama(), kv_cache_tokens=32) as llm:  # the cache limits max_model_len
        assert llm.max_model_len == 32
        with pytest.raises(RequestError, match="32"):
            llm.generate([[3] * 40], GREEDY)
        several = GREEDY.replace(n=8, temperature=1.0)  # needs more blocks than the cache has, so answers wait
        (output,) = llm.generate([[3] * 20], several)
        assert [len(one.token_ids) for one in output.outputs] == [12] * 8
        assert llm.stats().kv_cache_usage == 0


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_text_by_tokens_is_the_text_of_all_tokens(name: str, data: st.DataObject) -> None:
    """A character of several tokens is shown once it is complete, and no character is lost."""
    tokenizer = TOKENIZERS[name]()
    text = data.draw(st.text(st.sampled_from("ab ,é東\N{GRINNING FACE}\N{ZERO WIDTH JOINER}\n\t{1"), max_size=25))
    prompt = tokenizer("the quick", add_special_tokens=False).input_ids
    tokens = tokenizer("the quick " + text, add_special_tokens=False).input_ids[len(prompt) :]
    whole = tokenizer.decode(prompt + tokens)
    detokenizer = Detokenizer(TextDecoder(tokenizer), prompt)
    for token in tokens:
        new = detokenizer.append(token)
        assert "\N{REPLACEMENT CHARACTER}" not in new
    detokenizer.finish()
    assert tokenizer.decode(prompt) + detokenizer.text == whole


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_offsets_are_places_of_tokens_in_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "the é東 fox"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    shown = tokenizer.decode(ids)
    offsets = text_offsets(tokenizer, ids)
    for token, place in zip(ids, offsets, strict=True):
        alone = tokenizer.decode([token]).strip()
        assert "\ufffd" in alone or shown[place:].lstrip().startswith(alone)
    assert offsets == sorted(offsets) and max(offsets) < len(shown)
    model = text_model(tokenizer)
    with serve(model, tokenizer=tokenizer) as llm:
        params = GREEDY.replace(temperature=1.0, seed=1, max_tokens=20, logprobs=0)
        (answer,) = llm.generate("the ", params)[0].outputs
        prompt = tokenizer("the ").input_ids
        assert answer.text_offsets == [
            place - len(tokenizer.decode(prompt))
            for place in text_offsets(tokenizer, [*prompt, *answer.token_ids])[len(prompt) :]
        ]
        assert llm.generate("the ", params.replace(logprobs=None))[0].outputs[0].text_offsets is None


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_bytes_that_are_no_character_end_as_replacements(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer("\N{GRINNING FACE}", add_special_tokens=False).input_ids
    detokenizer = Detokenizer(TextDecoder(tokenizer), [])
    assert "".join(detokenizer.append(token) for token in tokens[:-1]).strip() == ""
    assert detokenizer.finish().startswith("\N{REPLACEMENT CHARACTER}")


def test_tokens_that_are_skipped_are_decoded_once() -> None:
    tokenizer = byte_level_tokenizer()
    first, *rest = tokenizer("the \N{GRINNING FACE}", add_special_tokens=False).input_ids
    decoder = TextDecoder(tokenizer)
    detokenizer = Detokenizer(decoder, [])
    decode, most = decoder.decode, 0

    def measured(ids: list[int]) -> str:
        nonlocal most
        most = max(most, len(ids))
        return decode(ids)

    decoder.decode = measured
    for token in [first, *[tokenizer.eos_token_id] * 50, *rest, tokenizer.bos_token_id]:
        detokenizer.append(token)
    detokenizer.finish()
    assert detokenizer.text == "the \N{GRINNING FACE}" and most <= 2 + len(rest)


@pytest.mark.parametrize("method", ["decode", "_decode"])
def test_tokens_become_text_by_the_tokenizers_own_decode(method: str) -> None:
    """A subclass of a tokenizer can change the text of tokens in `decode` or `_decode`."""
    tokenizer = byte_level_tokenizer()

    class Upper(type(tokenizer)):  # type: ignore[misc]
        pass

    def decode(self: Any, *args: Any, **options: Any) -> str:
        return str(getattr(super(Upper, self), method)(*args, **options)).upper()

    setattr(Upper, method, decode)
    tokenizer.__class__ = Upper
    detokenizer = Detokenizer(TextDecoder(tokenizer), [])
    for token in tokenizer("the quick", add_special_tokens=False).input_ids:
        detokenizer.append(token)
    assert detokenizer.text == "THE QUICK"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pieces=st.lists(st.text("ab", max_size=4)), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_the_end_that_may_become_a_stop_text_is_found_within_its_bound(pieces: list[str], stops: list[str]) -> None:
    text, held = "", 0
    for piece in pieces:
        text += piece
        ends = [length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])]
        held = held_back(text, stops, held + len(piece))
        assert held == max(ends, default=0)


def test_a_token_is_not_compared_with_each_beginning_of_a_stop_text() -> None:
    compared = 0

    class Counted(str):
        def __getitem__(self, key: Any) -> str:
            nonlocal compared
            compared += 1
            return super().__getitem__(key)

        def startswith(self, *given: Any) -> bool:
            nonlocal compared
            compared += 1
            return super().startswith(*given)

    tokenizer = TOKENIZERS[min(TOKENIZERS)]()
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        params = SamplingParams(seed=3, max_tokens=80, ignore_eos=True, stop=[Counted("\0" * 900), Counted("\1" * 900)])
        (output,) = llm.generate("the ", params)
    answer = output.outputs[0]
    assert len(answer.token_ids) == 80 and 0 < compared < 4 * len(answer.text)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_stop_texts_across_tokens_are_never_shown_in_part(name: str, include: bool) -> None:
    tokenizer = TOKENIZERS[name]()
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        base = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, temperature=0.8)
        for seed in range(3):
            params = base.replace(seed=seed)
            whole = llm.generate("the ", params)[0].outputs[0].text
            places = [place for place in range(2, len(whole) - 6, 3) if "\ufffd" not in whole[place : place + 5]]
            for place in places[:3]:
                stop = whole[place : place + 5]
                first = whole.index(stop)
                outputs = stream(llm, "the ", params.replace(stop=["zzz", stop], include_stop_str_in_output=include))
                answer = outputs[-1].outputs[0]
                assert answer.text == whole[: first + (5 if include else 0)]
                assert answer.finish_reason == "stop"
                assert answer.stop_reason == stop
                for output in outputs[:-1]:
                    assert whole[:first].startswith(output.outputs[0].text)
                # the start of a stop text that is never completed is returned
                assert stream(llm, "the ", params.replace(stop=[stop + "\0"]))[-1].outputs[0].text == whole
        assert llm.stats().kv_cache_usage == 0


def test_ends_by_tokens_and_lengths() -> None:
    model = llama()
    with serve(model) as llm:
        whole = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        stop = next(token for place, token in enumerate(whole) if place and token not in whole[:place])
        place = whole.index(stop)
        (found,) = llm.generate([[5, 6, 7]], GREEDY.replace(stop_token_ids=[stop]))[0].outputs
        assert (found.token_ids, found.finish_reason, found.stop_reason) == (whole[: place + 1], "stop", stop)
        shortest = GREEDY.replace(stop_token_ids=[stop], min_tokens=place + 2)
        (found,) = llm.generate([[5, 6, 7]], shortest)[0].outputs
        assert len(found.token_ids) >= place + 2
        assert stop not in found.token_ids[: place + 2]
        ends = GREEDY.replace(ignore_eos=False, logit_bias={2: 100.0})
        (found,) = llm.generate([[5, 6, 7]], ends)[0].outputs
        assert (found.token_ids, found.finish_reason, found.stop_reason) == ([2], "stop", None)
        (found,) = llm.generate([[5, 6, 7]], ends.replace(min_tokens=4))[0].outputs
        assert (len(found.token_ids), found.token_ids[-1]) == (5, 2)
        assert 2 not in found.token_ids[:4]
        (found,) = llm.generate([[5, 6, 7]], ends.replace(ignore_eos=True))[0].outputs
        assert (found.token_ids, found.finish_reason) == ([2] * 12, "length")
        (found,) = llm.generate([[5, 6, 7]], GREEDY.replace(allowed_token_ids=[9, 11]))[0].outputs
        assert set(found.token_ids) <= {9, 11}


def test_an_end_token_of_minus_one_is_no_token() -> None:
    """Scripts set -1 so that no token ends an answer; it must not stand for the last token of the vocabulary."""
    tokenizer = byte_level_tokenizer()
    model = text_model(tokenizer)
    last = model.config.vocab_size - 1
    model.generation_config.eos_token_id = -1
    with serve(model, tokenizer=tokenizer) as llm:
        params = GREEDY.replace(ignore_eos=False, min_tokens=5, allowed_token_ids=[last])
        (output,) = llm.generate("the", params)
        assert (output.error, output.outputs[0].token_ids) == (None, [last] * 12)
        structure = StructuredOutputsParams(choice=["the"])
        (output,) = llm.generate("a", GREEDY.replace(structured_outputs=structure))
        assert output.outputs[0].text == "the"


def test_bad_words_are_not_generated() -> None:
    tokenizer = byte_level_tokenizer()
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        (whole,) = llm.generate("the ", GREEDY)[0].outputs
        texts = {token: tokenizer.decode([token]).strip() for token in whole.token_ids}
        word = next(text for token, text in texts.items() if tokenizer(text).input_ids == [token])
        (found,) = llm.generate("the ", GREEDY.replace(bad_words=[word, "no such"]))[0].outputs
        banned = {tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in (word, " " + word)}
        for ids in banned:
            for place in range(len(found.token_ids)):
                assert tuple(found.token_ids[place : place + len(ids)]) != ids
        assert found.token_ids != whole.token_ids


@pytest.mark.parametrize("cache", [112, 2048])
def test_several_answers_share_the_prompt_and_leak_nothing(cache: int) -> None:
    """The answer of n=1 is the first of n=4. `best_of` returns two of these four, ordered by mean log-probability."""
    prompts = make_prompts(6, VOCABULARY, 20, shared=18)
    params = [SamplingParams(seed=number, max_tokens=16, ignore_eos=True) for number in range(6)]
    with serve(llama(), kv_cache_tokens=cache, max_model_len=64) as llm:
        one = llm.generate(prompts, params)
        four = llm.generate(prompts, [p.replace(n=4) for p in params])
        best = llm.generate(prompts, [p.replace(n=2, best_of=4, logprobs=0) for p in params])
        stats = llm.stats()
    assert stats.kv_cache_usage == 0
    assert (stats.num_preemptions > 0) == (cache == 112)
    for single, several, chosen in zip(one, four, best, strict=True):
        answers = [answer.token_ids for answer in several.outputs]
        assert answers[0] == single.outputs[0].token_ids
        assert len({tuple(answer) for answer in answers}) > 1
        assert [answer.index for answer in several.outputs] == [0, 1, 2, 3]
        assert len(chosen.outputs) == 2
        means = [answer.cumulative_logprob / len(answer.token_ids) for answer in chosen.outputs]
        assert means[0] >= means[1]
        assert all(answer.token_ids in answers for answer in chosen.outputs)


@pytest.mark.parametrize("budget", [1, 7, 32])
@pytest.mark.parametrize("cache", [112, 2048])
def test_logprobs_of_prompt_and_answer_are_those_of_the_plain_model(budget: int, cache: int) -> None:
    model = llama()
    prompts = make_prompts(8, VOCABULARY, 24, shared=18)
    params = GREEDY.replace(logprobs=3, prompt_logprobs=2, temperature=0.9, seed=1, logit_bias={7: 1.0})
    options = {"max_tokens_per_step": budget, "max_sequences": min(budget, 5), "kv_cache_tokens": cache}
    with serve(model, **options, max_model_len=64) as llm:
        llm.generate(prompts, GREEDY)  # fills the prefix cache
        outputs = llm.generate(prompts, params)
        assert llm.stats().kv_cache_usage == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        tokens = [*prompt, *answer.token_ids]
        with torch.no_grad():
            plain = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None and answer.logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *answer.logprobs]
        assert len(entries) == len(tokens) - 1
        for place, entry in enumerate(entries):
            assert entry is not None
            own = entry[tokens[place + 1]]
            for token, found in entry.items():
                assert abs(found.logprob - plain[place, token].item()) < 1e-4
            higher = int((plain[place] > plain[place, tokens[place + 1]] + 1e-4).sum())
            assert own.rank >= higher + 1
            assert len(entry) >= (2 if place < len(prompt) - 1 else 3)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_beams_have_the_scores_of_transformers(penalty: float) -> None:
    model = llama()
    with serve(model) as llm:
        for prompt in make_prompts(4, VOCABULARY, 10):
            params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, length_penalty=penalty)
            (output,) = llm.beam_search([prompt], params)
            wanted = model.generate(
                torch.tensor([prompt]),
                num_beams=3,
                num_return_sequences=3,
                max_new_tokens=6,
                do_sample=False,
                length_penalty=penalty,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            found = [beam.tokens for beam in output.sequences]
            assert found == wanted.sequences.tolist()
            scores = [beam.cum_logprob / 6**penalty for beam in output.sequences]
            torch.testing.assert_close(torch.tensor(scores), wanted.sequences_scores, atol=1e-4, rtol=0)
        assert llm.stats().kv_cache_usage == 0


def test_a_search_of_more_beams_than_may_wait_finds_the_same() -> None:
    params, found = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True), []
    for limit in (None, 1):
        with serve(llama(), max_queued=limit) as llm:
            (output,) = llm.beam_search([[3, 4, 5]], params)
        found.append([beam.tokens for beam in output.sequences])
    assert found[0] == found[1] and len(found[0]) == 3


def test_a_prompt_without_room_for_a_beam_is_refused() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    with serve(llama(), max_model_len=16) as llm:
        with pytest.raises(RequestError, match="16 tokens; the model takes 16"):
            llm.beam_search([[3] * 16], params)
        (output,) = llm.beam_search([[3] * 14], params)
    assert [len(beam.tokens) for beam in output.sequences] == [16, 16]


def test_containers_of_the_caller_may_change_while_a_request_runs() -> None:
    model = llama()
    with serve(model) as llm:
        whole = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        stops: list[int] = []
        biases = {40: 0.0}
        params = GREEDY.replace(stop_token_ids=stops, logit_bias=biases, allowed_token_ids=torch.arange(41))
        llm.engine.add_request("one", [5, 6, 7], params)
        stops += whole
        biases[40] = 100.0
        outputs = []
        while llm.engine.has_requests():
            outputs += llm.engine.step()
    assert outputs[0].outputs[0].token_ids == whole


def test_parameters_may_be_set_like_those_of_vllm() -> None:
    with serve(llama()) as llm:
        params = llm.get_default_sampling_params()
        params.min_tokens, params.max_tokens, params.temperature = 20, 20, 0
        llm.engine.add_request("one", [5, 6, 7], params)
        params.max_tokens = params.min_tokens = 3
        outputs = []
        while llm.engine.has_requests():
            outputs += llm.engine.step()
        assert len(outputs[0].outputs[0].token_ids) == 20
        assert len(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids) == 3
        params.top_p = 2.0
        with pytest.raises(RequestError, match="top_p is 2.0"):
            llm.generate([5, 6, 7], params)
    with pytest.raises(AttributeError, match="max_token"):
        params.max_token = 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", 5), ("stop_token_ids", 5), ("allowed_token_ids", "5"), ("bad_words", "word"), ("logit_bias", [5])],
)
def test_other_containers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value!r}".replace("[", r"\[")) as raised:
        SamplingParams(**{name: value})
    assert raised.value.parameter == name


@pytest.mark.parametrize("value", [None, True, 1.5, "3"])
@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_values_that_are_no_integers_are_refused(name: str, value: Any) -> None:
    given = {"stop_token_ids": [3, value], "allowed_token_ids": [value], "logit_bias": {value: 1.0}}.get(name, value)
    with pytest.raises(RequestError, match=rf"{name} is .*; write an integer") as raised:
        SamplingParams(**{name: given})
    assert raised.value.parameter == name
    with pytest.raises(RequestError, match=r"beam_width is .*; write an integer"):
        BeamSearchParams(value, 3)


@pytest.mark.parametrize("temperature", [1e-46, 1e-6, 1e-4])
def test_temperatures_near_zero_take_the_likeliest_token(temperature: float) -> None:
    with serve(llama()) as llm:
        wanted = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
        assert llm.generate([[5, 6, 7]], GREEDY.replace(temperature=temperature))[0].outputs[0].token_ids == wanted
    with pytest.raises(RequestError, match="at most 1000000"):
        SamplingParams(temperature=1e39)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([3], {"temperature": 0}, "give SamplingParams"),
        ([3], [None], "give SamplingParams"),
        ([3], 5, "sampling_params is 5; give one for all"),
        ([3], [GREEDY, GREEDY], "1 prompts got 2 sampling_params"),
        ({"prompt_token_ids": [3], "multi_modal_data": {"image": 1}}, GREEDY, "the key 'multi_modal_data'"),
        ({"text": "a"}, GREEDY, "the key 'text'"),
        ({"prompt": None}, GREEDY, "give prompt or prompt_token_ids"),
    ],
)
def test_calls_of_another_form_say_what_to_give(prompt: Any, params: Any, message: str) -> None:
    with serve(llama()) as llm:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, params)
        assert not llm.engine.has_requests()
        assert llm.generate({"prompt_token_ids": [3], "prompt": None}, GREEDY)[0].finished


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_token_without_text_ends_its_request_alone(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer()
    decode = tokenizer.decode

    def fail_at_one(ids: Any, **arguments: Any) -> str:
        if list(ids) == [77]:
            raise IndexError("piece id out of range")
        return str(decode(ids, **arguments))

    with serve(text_model(tokenizer), tokenizer=tokenizer, max_tokens_per_step=8) as llm:
        monkeypatch.setattr(tokenizer, "decode", fail_at_one)
        plain = GREEDY.replace(detokenize=False)
        failing = plain.replace(temperature=1.0, n=2, allowed_token_ids=[77], **{field: 0})
        outputs = llm.generate([[5, 77, *range(6, 26)], [5, 6, 7]], [failing, plain])
        assert llm.stats().kv_cache_usage == 0
    assert "piece id out of range" in str(outputs[0].error) and not outputs[0].is_request_error
    assert outputs[1].error is None and len(outputs[1].outputs[0].token_ids) == 12


def test_lists_of_another_length_are_refused_by_the_name_of_the_argument() -> None:
    with serve(llama()) as llm:
        for name, given in (("sampling_params", [GREEDY] * 2), ("lora_request", [None] * 2), ("priority", [0] * 2)):
            with pytest.raises(RequestError, match="1 prompts got 2") as raised:
                llm.generate([[3]], **{name: given})
            assert raised.value.parameter == name


def test_a_priority_that_is_no_integer_and_a_closed_engine_are_refused() -> None:
    with serve(llama()) as llm:
        with pytest.raises(RequestError, match="priority is 'high'"):
            llm.generate([[3]], GREEDY, priority=["high"])  # type: ignore[list-item]
        assert llm.generate([[3]], GREEDY, priority=[-1])[0].finished
    llm.close()
    with pytest.raises(RequestError, match="engine is closed"):
        llm.generate([[3]], GREEDY)


def test_modes_of_the_caller_change_no_token() -> None:
    tokenizer = byte_level_tokenizer()
    model = text_model(tokenizer)

    def answer(llm: LLM) -> list[int]:
        return list(llm.generate("the quick ", GREEDY)[0].outputs[0].token_ids)

    with serve(model) as llm:
        wanted = list(llm.generate([tokenizer("the quick ").input_ids], GREEDY)[0].outputs[0].token_ids)
    modes: list[Any] = [
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        torch.enable_grad,
    ]
    for mode in modes:
        with mode():
            llm = LLM(model, tokenizer=tokenizer, max_tokens_per_step=32, max_sequences=8)
            assert answer(llm) == wanted
        assert answer(llm) == wanted
        llm.close()


def test_started_steps_and_embeddings_run_outside_the_modes_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pp, any call of the engine may run the forward of a step that was started before."""
    model = llama()
    modes: list[tuple[bool, str]] = []

    def note(*_: Any) -> None:
        modes.append((torch.is_autocast_enabled("cpu"), torch.get_default_device().type))

    model.register_forward_pre_hook(note)
    model.model.register_forward_pre_hook(note)
    with serve(model) as llm:
        engine: Any = llm.engine
        engine.runner.call = lambda function, *arguments: function(model, *arguments)
        calls = [engine.clear_prefix_cache, lambda: llm.embed([[3]]), lambda: (note_update(model), engine.step())]
        for number, call in enumerate(calls):
            engine.add_request(str(number), [3, 4, 5], GREEDY)
            assert engine._start_step()
            before = len(modes)
            with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
                call()
            assert len(modes) > before
            while engine.has_requests():
                engine.step()
        monkeypatch.setattr(embeddings, "ShardedRunner", type(engine.runner))
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            llm.embed([[3]])
    assert set(modes) == {(False, "cpu")}


def test_preempted_requests_leave_the_queue_to_new_ones() -> None:
    with serve(llama(), kv_cache_tokens=32, max_queued=2) as llm:
        engine = llm.engine
        engine.add_request("several", [3] * 20, GREEDY.replace(n=8, temperature=1.0))
        while engine.stats().num_waiting < 2:
            engine.step()
        assert not engine.is_full
        for name in ("one", "two"):
            engine.add_request(name, [3, 4], GREEDY)
        with pytest.raises(EngineOverloadedError, match="2 requests are waiting"):
            engine.add_request("three", [3, 4], GREEDY)
        finished = []
        while engine.has_requests():
            finished += engine.step()
    assert sorted(output.request_id for output in finished) == ["one", "several", "two"]


def test_threads_take_turns() -> None:
    with serve(llama()) as llm:
        prompts = [[3, 4, number] for number in range(5, 13)]
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
        found: dict[int, Any] = {}

        def ask(number: int) -> None:
            found[number] = llm.generate([prompts[number]], GREEDY)[0].outputs[0].token_ids

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[number] for number in range(len(prompts))] == wanted


def test_the_progress_goes_to_standard_error_if_it_is_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with serve(llama()) as llm:
        capsys.readouterr()
        llm.generate([[3]], GREEDY, use_tqdm=True)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes every stream for a terminal
        llm.generate([[3]], GREEDY, use_tqdm=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "0%" in shown.err


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ extra }}"
)


def test_conversations_become_prompts_by_a_template() -> None:
    tokenizer = byte_level_tokenizer()
    user = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]}]
    begun = [*user, {"role": "assistant", "content": "one two"}]
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat(user, GREEDY)

        def prompt_of(messages: Any, **arguments: Any) -> str:
            (output,) = llm.chat(messages, GREEDY, chat_template=TEMPLATE, **arguments)
            assert output.prompt == tokenizer.decode(output.prompt_token_ids)
            return str(output.prompt)

        assert prompt_of(user) == "<user>the\nfox<assistant>"
        assert prompt_of(user, chat_template_kwargs={"extra": "!"}) == "<user>the\nfox<assistant>!"
        continued = prompt_of(begun, add_generation_prompt=False, continue_final_message=True)
        assert continued == "<user>the\nfox<assistant>one two"
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        with pytest.raises(RequestError, match="text only"):
            llm.chat(picture, GREEDY, chat_template=TEMPLATE)
        with pytest.raises(RequestError, match="template refuses the messages: only pairs"):
            llm.chat(user, GREEDY, chat_template="{{ raise_exception('only pairs') }}")
        assert len(llm.chat([user, begun], GREEDY, chat_template=TEMPLATE)) == 2


_LOOP = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"


CONTENT_FORMS = [
    (_LOOP, ContentForm.PARTS),
    ("{% set found = message['content'] %}" + _LOOP.replace("message.content", "found"), ContentForm.PARTS),
    ("{{ message['content'][0]['text'] }}", ContentForm.ONE_PART),
    (_LOOP.replace("message.content", "message['content'] | selectattr('type', 'equalto', 'text')"), ContentForm.PARTS),
    ("{% generation %}{{ message.content[0].text }}{% endgeneration %}", ContentForm.ONE_PART),
    ("{% if message.content is string %}{{ message.content }}{% else %}" + _LOOP + "{% endif %}", ContentForm.TEXT),
    ("{{ message.content | trim }}{% for call in message.tool_calls or [] %}{% endfor %}", ContentForm.TEXT),
    ("{% set content = message.content.split('</think>') %}{{ content[0].strip() }}", ContentForm.TEXT),
    ("{% for character in message.content %}{{ character }}{% endfor %}", ContentForm.TEXT),
    ("{{ message.content.split('x')[0] }}{% if message.content[:1] == 'a' %}{% endif %}", ContentForm.TEXT),
]


def test_contents_have_the_form_that_the_template_reads() -> None:
    tokenizer = byte_level_tokenizer()
    messages = [{"role": "system", "content": "the fo"}, {"role": "user", "content": [{"type": "text", "text": "1"}]}]
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        for body, form in CONTENT_FORMS:
            template = "{% for message in messages %}<{{ message.role }}>" + body + "{% endfor %}"
            assert read_forms(template).content is form
            (output,) = llm.chat(messages, GREEDY, chat_template=template)
            assert output.prompt == "<system>the fo<user>1", body
        with pytest.raises(RequestError, match="chat_template_content_format"):
            llm.chat(messages, GREEDY, chat_template=template, chat_template_content_format="text")


def test_the_template_for_tools_decides_the_form_where_tools_are_shown() -> None:
    tokenizer = byte_level_tokenizer()
    default = "{% for message in messages %}{{ message.content }}{% endfor %}"
    parts = "{% for message in messages %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    tokenizer.chat_template = {"default": default, "tool_use": parts, "parts": parts}
    messages = [{"role": "user", "content": "the"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        for options, prompt in (({}, "the"), ({"tools": tools}, "[the]"), ({"chat_template": "parts"}, "[the]")):
            (output,) = llm.chat(messages, GREEDY, **options)
            assert output.prompt == prompt


def test_a_template_that_reads_parts_gets_the_parts_of_the_caller() -> None:
    tokenizer = byte_level_tokenizer()
    content = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "one"}]
    template = "{% for message in messages %}{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    either = template.replace(
        "{% for part", "{% if message.content is string %}{{ message.content }}{% else %}{% for part"
    )
    either = either.replace("{% endfor %}", "{% endfor %}{% endif %}", 1)
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        for form in ("auto", "openai"):
            (output,) = llm.chat(messages, GREEDY, chat_template=template, chat_template_content_format=form)
            assert output.prompt == "<the><fox><one>"
        for form, prompt in (("auto", "the\nfoxone"), ("openai", "<the><fox><one>"), ("string", "the\nfoxone")):
            (output,) = llm.chat(messages, GREEDY, chat_template=either, chat_template_content_format=form)
            assert output.prompt == prompt
        first = "{% for message in messages %}{{ message.content[0].text }};{% endfor %}"
        (output,) = llm.chat(messages, GREEDY, chat_template=first)
        assert output.prompt == "the\nfox;one;"
        refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
        (output,) = llm.chat([refusal], GREEDY, chat_template=template)
        assert output.prompt == "<no>"
        (output,) = llm.chat(messages, GREEDY, chat_template=TEMPLATE, chat_template_content_format="string")
        assert output.prompt == "<user>the\nfox<assistant>one<assistant>"


def test_calls_of_tools_in_messages_are_read_as_by_the_server() -> None:
    """A message that calls tools needs no content, and its arguments may be JSON, as in OpenAI's answers."""
    tokenizer = byte_level_tokenizer()
    template = (
        "{% for m in messages %}<{{ m.content }}>{% for call in m.tool_calls %}{{ call.function.arguments.fox }}"
        "{% endfor %}{% endfor %}"
    )
    parts = template.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")

    def message(arguments: Any, **content: Any) -> dict[str, Any]:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"role": "assistant", **content, "tool_calls": calls}

    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        first = template.replace("{{ m.content }}", "{{ m.content[0].text }}")
        for form in (template, parts, first):
            for sent in (
                message('{"fox": "the"}'),
                message({"fox": "the"}, content=None),
                message('{"fox": "the"}', content=""),
                message({"fox": "the"}, content=[]),
            ):
                (output,) = llm.chat([sent], GREEDY, chat_template=form)
                assert output.prompt == "<>the"
        with pytest.raises(RequestError, match="arguments of a tool call are not JSON"):
            llm.chat([message("{")], GREEDY, chat_template=template)
        kept = "{% for m in messages %}{% if m.content %}full{% endif %}the{% endfor %}"
        (output,) = llm.chat([message("{}")], GREEDY, chat_template=kept, chat_template_content_format="openai")
        assert output.prompt == "the"


def test_an_empty_list_of_calls_is_no_call() -> None:
    """Servers such as vLLM's send one with each answer; the template of Llama 3.1 takes the key alone for a call."""
    tokenizer = byte_level_tokenizer()
    template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ raise_exception('one call') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        message = {"role": "assistant", "content": "the", "tool_calls": []}
        (output,) = llm.chat([message], GREEDY, chat_template=template)
    assert output.prompt == "the" and message["tool_calls"] == []


def test_a_template_may_write_arguments_of_calls() -> None:
    """Templates of DeepSeek join the arguments to other text, so they need a text."""
    tokenizer = byte_level_tokenizer()
    template = (
        "{% for m in messages %}{% for tool in m['tool_calls'] %}{{ 'the ' + tool['function']['arguments'] }}"
        "{% endfor %}{{ m['content'] + '.' }}{% endfor %}"
    )
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        for arguments in ('{"fox": 1}', {"fox": 1}):
            calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
            (output,) = llm.chat([{"role": "assistant", "tool_calls": calls}], GREEDY, chat_template=template)
            assert output.prompt == 'the {"fox": 1}.'
        calls[0]["function"]["arguments"] = "{"
        with pytest.raises(RequestError, match="arguments of a tool call are not JSON"):
            llm.chat([{"role": "assistant", "tool_calls": calls}], GREEDY, chat_template=template)


def test_a_text_that_is_not_unicode_is_refused() -> None:
    tokenizer = byte_level_tokenizer()
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        with pytest.raises(RequestError, match="the prompt is not valid Unicode text"):
            llm.generate("fox \ud800")
        with pytest.raises(RequestError, match="a message is not valid Unicode text"):
            llm.chat([{"role": "user", "content": "fox \ud800"}], chat_template=template)


def test_tokens_beyond_the_tokenizer_have_no_text() -> None:
    tokenizer = byte_level_tokenizer()
    beyond = len(tokenizer) + 3
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        (output,) = llm.generate("the ", GREEDY.replace(allowed_token_ids=[beyond], logprobs=1))
    assert output.outputs[0].token_ids == [beyond] * 12
    assert output.outputs[0].text == ""


def test_a_tokenizer_without_a_token_for_a_part_of_a_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow tokenizer without an unknown token gives None for such a part."""
    tokenizer = byte_level_tokenizer()
    call = type(tokenizer).__call__

    def encode(self: Any, text: Any, **options: Any) -> Any:
        found = call(self, text, **options)
        texts = [text] if isinstance(text, str) else text
        lists = [found.input_ids] if isinstance(text, str) else found.input_ids
        for ids, one in zip(lists, texts, strict=True):
            if "x" in one:
                ids[-1] = None
        return found

    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        (plain,) = llm.generate("the ", GREEDY.replace(bad_words=["fo"]))
        monkeypatch.setattr(type(tokenizer), "__call__", encode)
        asks: list[Any] = [llm.generate, llm.embed]
        for ask in asks:
            with pytest.raises(RequestError, match="has no token for a part of the prompt, and no unk_token"):
                ask(["the ", "the fox"])
        (output,) = llm.generate("the ", GREEDY.replace(bad_words=["fo", "x", "fox"]))
        assert output.outputs == plain.outputs  # a text without tokens is never generated


def test_a_tokenizer_that_cannot_decode_does_not_hide_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<new>"])  # to the tokenizer alone
    model = text_model(tokenizer, extra=-1)
    with serve(model, tokenizer=tokenizer) as llm:
        monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: {}["no such token"])
        with pytest.raises(RequestError, match=r"gives the token \d+ \(which it cannot decode\), and"):
            llm.generate("<new>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"allowed_token_ids": [99]}, "allowed_token_ids has the token 99, beyond a vocabulary of 41"),
        ({"logit_bias": {41: 1.0}}, "logit_bias has the token 41"),
        ({"stop_token_ids": [77]}, "stop_token_ids has the token 77"),
        ({"bad_words": ["a"]}, "bad_words needs a tokenizer"),
        ({"n": 9, "temperature": 1.0}, "n or best_of is 9, and the engine runs 8"),
    ],
)
def test_parameters_that_cannot_be_served_are_refused(change: dict[str, Any], message: str) -> None:
    with serve(llama()) as llm:
        with pytest.raises(RequestError, match=message) as raised:
            llm.generate([[3, 4]], GREEDY.replace(**change))
        assert raised.value.parameter in change
        assert llm.generate([[3, 4]], GREEDY)[0].finished
        with pytest.raises(RequestError, match="no adapter 'x'; loaded are none"):
            llm.generate([[3, 4]], GREEDY, lora_request="x")


@pytest.mark.parametrize(("kept", "left"), [(5, 5), (500, 200), (-1, 96 - 12), (None, None)])
def test_the_end_of_a_prompt_is_kept_if_asked_for(kept: int | None, left: int | None) -> None:
    prompt = [3 + index % 30 for index in range(200)]
    with serve(llama()) as llm:
        params = GREEDY.replace(truncate_prompt_tokens=kept)
        if left is None or left >= 96:
            with pytest.raises(RequestError, match=r"the prompt has 200 tokens"):
                llm.generate([prompt], params)
            return
        (output,) = llm.generate([prompt], params)
        (expected,) = llm.generate([prompt[-left:]], GREEDY)
    assert output.prompt_token_ids == prompt[-left:]
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_request_without_a_token_ends_alone() -> None:
    with serve(llama()) as llm:
        params = [GREEDY, GREEDY.replace(allowed_token_ids=[2], min_tokens=3, ignore_eos=False), GREEDY]
        outputs = llm.generate([[3, 4]] * 3, params)
        assert llm.stats().kv_cache_usage == 0
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "exclude all tokens" in str(outputs[1].error)
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids


@pytest.mark.parametrize("prompt", [[1.7, 2], ["3", "4"], b"abc", [True, False], [None], "a\udcff"])
def test_prompts_that_are_no_text_and_no_tokens_are_refused(prompt: Any) -> None:
    """The engine does not convert such a prompt to tokens."""
    tokenizer = byte_level_tokenizer()
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm, pytest.raises(RequestError) as raised:
        llm.engine.add_request("one", prompt, GREEDY)
    assert raised.value.parameter == "prompt"


def test_a_text_with_a_token_that_only_the_tokenizer_has_is_refused() -> None:
    """Such a token may have been added for training, and the model's embeddings are not resized yet."""
    tokenizer = byte_level_tokenizer()
    model = text_model(tokenizer, extra=0)
    tokenizer.add_tokens(["<new>"])
    with serve(model, tokenizer=tokenizer) as llm:
        with pytest.raises(RequestError, match=r"the token \d+ \('<new>'\), and the model has a vocabulary") as raised:
            llm.generate(["the fox", "the <new> fox"], GREEDY)
        assert raised.value.parameter == "prompt"
        assert llm.generate("the fox", GREEDY)[0].finished


@pytest.mark.parametrize("prompt", [None, 5, 1.5])
def test_what_is_no_list_of_prompts_is_refused(prompt: Any) -> None:
    with serve(llama()) as llm, pytest.raises(RequestError, match="give a text"):
        llm.generate(prompt, GREEDY)


def test_prompts_of_arrays_and_tensors() -> None:
    import numpy as np

    with serve(llama()) as llm:
        wanted = llm.generate([[3, 4, 5]], GREEDY)[0].outputs[0].token_ids
        tokens = np.array([3, 4, 5])
        for prompts in (tokens, tokens[None], list(tokens), [tokens], torch.tensor(tokens), (3, 4, 5)):
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == [wanted]


@pytest.mark.parametrize("change", [{"logit_bias": {3: 1e308}}, {"repetition_penalty": 1e-320}])
def test_parameters_that_break_the_logits_are_errors_of_the_request(change: dict[str, Any]) -> None:
    with serve(llama()) as llm:
        outputs = llm.generate([[3, 4]] * 2, [GREEDY.replace(**change), GREEDY])
    assert outputs[0].is_request_error and "logit_bias and penalties" in str(outputs[0].error)
    assert outputs[1].error is None


def test_logits_that_are_no_numbers_end_a_beam_search_and_are_no_error_of_the_request() -> None:
    model = llama()
    with serve(model) as llm:
        with torch.no_grad():
            model.lm_head.weight.fill_(torch.nan)
        with pytest.raises(ModelError, match="highest logit of the model is nan"):
            llm.beam_search([[3, 4]], BeamSearchParams(beam_width=2, max_tokens=3))
        (output,) = llm.generate([[3, 4]], GREEDY)
        assert output.error is not None and not output.is_request_error
        assert llm.stats().kv_cache_usage == 0


def test_an_interrupted_beam_search_leaves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(llama()) as llm:
        step = llm.engine.step
        monkeypatch.setattr(llm.engine, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.beam_search([[3, 4]], BeamSearchParams(beam_width=2, max_tokens=3))
        monkeypatch.setattr(llm.engine, "step", step)
        assert not llm.engine.has_requests()
        assert len(llm.beam_search([[3, 4]], BeamSearchParams(beam_width=2, max_tokens=3))[0].sequences) == 2


def test_embeddings_are_normalized_hidden_states_of_the_last_token() -> None:
    tokenizer = byte_level_tokenizer()
    model = text_model(tokenizer)
    with serve(model, tokenizer=tokenizer) as llm:
        found = llm.embed([TEXT[0][:30], {"prompt_token_ids": [5, 6, 7]}])
        for output in found:
            with torch.no_grad():
                hidden = model.model(input_ids=torch.tensor([output.prompt_token_ids])).last_hidden_state[0, -1]
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), hidden / hidden.norm())
        assert found[1].prompt_token_ids == [5, 6, 7] and found[1].outputs.hidden_size == hidden.shape[0]
        with pytest.raises(RequestError, match="an input has 0 tokens"):
            llm.embed([[]])


def test_members_of_vllm_that_are_not_built_name_another() -> None:
    with serve(llama()) as llm:
        assert not hasattr(llm, "score")
        with pytest.raises(AttributeError, match="windlass.LLM has no 'encode': use embed"):
            llm.encode(["text"])


@pytest.mark.parametrize("policy", ["splitfuse", "prefill-first"])
@pytest.mark.parametrize("cache", [96, 4096])
def test_waiting_requests_are_left_out_of_plans_that_admit_none(policy: str, cache: int) -> None:
    with serve(llama(), policy=policy, kv_cache_tokens=cache, max_model_len=40, max_sequences=3) as llm:
        planner = llm.engine._planner
        plan, find = planner._schedule, planner._find_admissible
        skipped = 0

        def compared(now: float, share: int | None) -> Any:
            nonlocal skipped
            waiting = list(llm.engine._table.waiting.values())
            skipped += len(waiting) - len(find(waiting, sum(map(count_candidates, llm.engine._table.running.values()))))
            short = plan(now, share)
            planner._find_admissible = lambda waiting, places: waiting
            assert plan(now, share) == short
            planner._find_admissible = find
            return short

        planner._schedule = compared
        prompts = make_prompts(16, VOCABULARY, 20, shared=9)
        params = [GREEDY.replace(temperature=1.0, n=1 + number % 2) for number in range(16)]
        llm.generate(prompts, params, priority=[number // 5 % 3 for number in range(16)])
    assert skipped > 16


def test_a_request_whose_text_fails_can_be_cancelled() -> None:
    tokenizer = byte_level_tokenizer()

    def fail(*_: Any, **arguments: Any) -> str:
        raise IndexError("piece id out of range")

    tokenizer.__class__ = type("Failing", (type(tokenizer),), {"decode": fail})

    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        llm.engine.add_request("one", [3, 4, 5], GREEDY)
        output = llm.engine.cancel("one")
        assert output is not None and output.outputs[0].finish_reason == "abort"
        (failed,) = llm.generate([[3, 4, 5]], GREEDY)
        assert "piece id out of range" in str(failed.error) and failed.outputs[0].finish_reason == "error"
        assert llm.stats().kv_cache_usage == 0


def test_only_computed_prompts_are_counted() -> None:
    with serve(llama()) as llm:
        llm.engine.add_request("one", [3, 4, 5], GREEDY)
        llm.engine.cancel("one")
        assert llm.stats().prompt_tokens == 0
        llm.generate([[3, 4, 5]] * 2, GREEDY.replace(temperature=1.0, n=3))
        assert llm.stats().prompt_tokens == 6


@pytest.mark.parametrize("name", ["stop", "bad_words"])
@pytest.mark.parametrize("texts", [["a" * 1001], [""], [3], [str(number) for number in range(2000)]])
def test_texts_that_each_token_is_compared_with_are_bounded(name: str, texts: list[Any]) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**{name: texts})
    assert raised.value.parameter == name


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_is_kept_if_asked_for(include: bool) -> None:
    tokenizer = byte_level_tokenizer()
    (letter,) = tokenizer("q", add_special_tokens=False).input_ids
    with serve(text_model(tokenizer), tokenizer=tokenizer) as llm:
        params = GREEDY.replace(allowed_token_ids=[letter], stop_token_ids=[letter], include_stop_str_in_output=include)
        (output,) = llm.generate("the ", params)
        assert output.outputs[0].stop_reason == letter and output.outputs[0].token_ids == [letter]
        assert output.outputs[0].text == ("q" if include else "")
        special = params.replace(allowed_token_ids=[tokenizer.eos_token_id], stop_token_ids=[tokenizer.eos_token_id])
        assert llm.generate("the ", special)[0].outputs[0].text == ""
        shown = llm.generate("the ", special.replace(skip_special_tokens=False))[0].outputs[0].text
        assert shown == (END if include else "")


@pytest.mark.parametrize("stops", [None, [], [0]])
def test_the_end_token_is_not_drawn_before_the_least_number_of_tokens(stops: list[int] | None) -> None:
    """As in vLLM, this holds even if the end token does not end the answer."""
    model = llama()
    with serve(model) as llm:
        free = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    model.generation_config.eos_token_id = free[1]
    with serve(model) as llm:
        params = GREEDY.replace(ignore_eos=True, min_tokens=4, stop_token_ids=stops)
        found = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    assert free[1] not in found[:4]


def test_the_largest_token_of_a_prompt_is_that_of_the_embedding() -> None:
    """Some models embed more tokens than they have logits for, such as one of an image."""
    assert count_embeddings(build("llama", vocab_size=70)) == 70
    assert count_embeddings(torch.nn.Linear(2, 2)) == 0


def test_a_prompt_may_have_tokens_without_logits() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<image>"])
    model = text_model(tokenizer, extra=-1)
    table = torch.randn(len(tokenizer), model.get_input_embeddings().embedding_dim)
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(table))
    image = tokenizer.convert_tokens_to_ids("<image>")
    params = GREEDY.replace(repetition_penalty=1.5, prompt_logprobs=1)
    with serve(model, tokenizer=tokenizer) as llm:
        (alone,) = llm.generate("the fox", params)
        mixed, other = llm.generate(["the <image>fox", "the fox"], params)
        assert mixed.error is None and len(mixed.outputs[0].token_ids) == params.max_tokens
        assert other.outputs == alone.outputs and other.prompt_logprobs == alone.prompt_logprobs
        place = mixed.prompt_token_ids.index(image)
        entry = (mixed.prompt_logprobs or [])[place]
        assert entry is not None and entry[image].logprob == -math.inf and entry[image].rank == image + 1
        (as_tokens,) = llm.generate([mixed.prompt_token_ids], params)
        assert as_tokens.outputs == mixed.outputs
        (beams,) = llm.beam_search("the <image>fox", BeamSearchParams(beam_width=2, max_tokens=3))
        assert beams.sequences[0].tokens[: len(mixed.prompt_token_ids)] == mixed.prompt_token_ids
        with pytest.raises(RequestError, match=rf"token {image + 1} of the prompt is not in the vocabulary"):
            llm.generate([[3, image + 1]])
