"""Law: the text of a random model is in the language of the structured output, for any schedule."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from tests.inference.text_models import byte_level_tokenizer, sentencepiece_tokenizer, text_model
from windlass.base.errors import RequestError
from windlass.inference.async_engine import AsyncLLMEngine
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams, StructuredOutputsParams
from windlass.inference.structured_output import OutputConstraint, StructuredOutputCompiler

SCHEMA = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}, "count": {"type": "integer"}},
    "required": ["flag", "kind"],
    "additionalProperties": False,
}
SUM = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'


def obeys(params: StructuredOutputsParams, text: str) -> bool:
    if params.json is not None:
        value = json.loads(text)
        return (
            isinstance(value["flag"], bool) and value["kind"] in ("a", "bc") and set(value) <= set(SCHEMA["properties"])
        )
    if params.regex is not None:
        return re.fullmatch(params.regex, text) is not None
    if params.choice is not None:
        return text in params.choice
    return re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})*", text) is not None


KINDS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(json=json.dumps(SCHEMA)),
    StructuredOutputsParams(regex="(ab|cd){2,5}x?"),
    StructuredOutputsParams(choice=["yes", "no", 'a "quoted" \\ word\n', "東京"]),
    StructuredOutputsParams(grammar=SUM),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative": {"num_tokens": 3}},
    "preempted": {"kv_cache_tokens": 256, "max_sequences": 8, "max_tokens_per_step": 8},
}


@pytest.mark.parametrize("option", sorted(OPTIONS))
@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_texts_obey_their_structure(make: Any, option: str) -> None:
    tokenizer = make()
    model = text_model(tokenizer)
    params = [
        # a random model ends numbers and spaces only with a bias for the end token
        SamplingParams(
            n=2,
            seed=seed,
            max_tokens=180,
            structured_outputs=kind,
            logit_bias={tokenizer.eos_token_id: 4.0},
            bad_words=None,
        )
        for seed, kind in enumerate(KINDS * 2)
    ]
    settings = {"max_model_len": 256, "check_at_load": False, **OPTIONS[option]}
    with LLM(model, tokenizer=tokenizer, **settings) as llm:
        outputs = llm.generate(["the list "] * len(params), params)
        stats = llm.stats()
    complete = 0
    for given, output in zip(params, outputs, strict=True):
        assert output.error is None
        for answer in output.outputs:
            if answer.finish_reason == "stop":
                complete += 1
                assert given.structured_outputs is not None
                assert obeys(given.structured_outputs, answer.text), answer.text
    assert complete >= 16  # not all 20: spaces in JSON have no limit
    assert stats.kv_cache_usage == 0
    if option == "preempted":
        assert stats.num_preemptions > 0


def test_any_object_is_json() -> None:
    tokenizer = byte_level_tokenizer()
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=200, structured_outputs=StructuredOutputsParams(json_object=True)
    )
    ends = {token: 3.0 for text, token in tokenizer.get_vocab().items() if set(text) <= set('"}]:')}
    with LLM(text_model(tokenizer), tokenizer=tokenizer, check_at_load=False) as llm:
        outputs = llm.generate(["a"] * 6, [params.replace(seed=seed, logit_bias=ends) for seed in range(6)])
    texts = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize("schema", [{}, "{}"])
def test_an_empty_schema_allows_any_value(schema: Any) -> None:
    tokenizer = byte_level_tokenizer()
    compiler = StructuredOutputCompiler(tokenizer, len(tokenizer))
    starts = tokenizer.convert_tokens_to_ids(["{", "[", "1"])
    params = [StructuredOutputsParams(json=schema), StructuredOutputsParams(json_object=True)]
    allowed = [compiler.compile(one).allowed()[starts].tolist() for one in params]
    assert allowed == [[True, True, True], [True, False, False]]


GBNF = """
root ::= select | "nothing"   # a comment
select ::= "SELECT " column " where " column "= " [0-9]+ ";"
column ::= "col_" ("1" | "2") " "
"""


def test_grammars_in_gbnf_are_those_of_other_servers() -> None:
    tokenizer = byte_level_tokenizer()
    params = SamplingParams(
        n=6, seed=3, temperature=2.0, max_tokens=150, structured_outputs=StructuredOutputsParams(grammar=GBNF)
    )
    with LLM(text_model(tokenizer), tokenizer=tokenizer) as llm:
        (output,) = llm.generate("a", params)
        for answer in output.outputs:
            assert re.fullmatch(r"nothing|SELECT col_[12]  where col_[12] = [0-9]+;", answer.text), answer.text
        with pytest.raises(RequestError, match="cannot be compiled: .*GBNF"):
            llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(grammar="root ::= (")))


def test_a_constraint_that_becomes_too_large_is_an_error_and_no_end() -> None:
    import llguidance

    tokenizer = byte_level_tokenizer()
    compiler = StructuredOutputCompiler(tokenizer, len(tokenizer))
    compiler.load()
    grammar = llguidance.LLMatcher.grammar_from_regex(r"[a-z]{1,200}(foo|bar)[0-9]{1,100}")
    limits = llguidance.LLParserLimits(step_lexer_fuel=200)
    constraint = OutputConstraint(llguidance.LLMatcher(compiler._vocabulary, grammar, limits=limits), len(tokenizer))
    with pytest.raises(RequestError, match="cannot continue: .*too many expressions"):
        for _ in range(20):
            constraint.accept(int(constraint.allowed().nonzero()[3]))
    assert not constraint.is_complete()


def test_whitespace_and_properties_of_json_can_be_limited() -> None:
    tokenizer = byte_level_tokenizer()
    inner = {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]}
    found = {"properties": inner, "list": {"type": "array", "items": inner, "maxItems": 3}}
    schema = {"type": "object", "properties": found, "required": ["list"]}

    def texts(**options: Any) -> list[str]:
        structure = StructuredOutputsParams(json=schema, **options)
        params = SamplingParams(n=5, seed=2, temperature=2.0, max_tokens=220, structured_outputs=structure)
        return [answer.text for answer in llm.generate("a", params)[0].outputs]

    with LLM(text_model(tokenizer), tokenizer=tokenizer) as llm:
        plain = texts(disable_any_whitespace=True, disable_additional_properties=True)
        for text in plain:
            assert re.fullmatch(r'[\[\]{}",:a-z]*', text), text
        assert {key for text in texts() for key in re.findall(r'"([^"]*)"\s*:', text)} > {"list", "flag"}
        for text in texts(whitespace_pattern=" ?", disable_additional_properties=True):
            assert not re.search(r"\s\s|[\t\r\n]", text), text
    for wrong in ({"regex": "a"}, {"json": {}, "disable_any_whitespace": True}):
        with pytest.raises(RequestError, match="structured_outputs") as raised:
            StructuredOutputsParams(whitespace_pattern=" ", **wrong)
        assert raised.value.parameter == "structured_outputs"


def test_branches_of_all_of_stay_open_together() -> None:
    """A branch that allowed only its own properties would refuse those that another branch requires."""
    tokenizer = byte_level_tokenizer()
    compiler = StructuredOutputCompiler(tokenizer, len(tokenizer))
    compiler.load()

    def accepts(schema: dict[str, Any], text: str) -> bool:
        structure = StructuredOutputsParams(json=schema, disable_additional_properties=True)
        constraint = compiler.compile(structure)
        for token in tokenizer.encode(text):
            if not constraint.allowed()[token]:
                return False
            constraint.accept(token)
        return bool(constraint.is_complete())

    inner = {"type": "object", "properties": {"c": {"type": "boolean"}}, "required": ["c"]}
    a = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    b = {"type": "object", "properties": {"b": inner}, "required": ["b"]}
    both, more = '{"a":true,"b":{"c":true}}', '{"a":true,"b":{"c":true,"d":1}}'
    definitions = {"$defs": {"A": a}, "allOf": [{"$ref": "#/$defs/A"}, b]}
    for joined in ({"allOf": [a, b]}, {**a, "allOf": [b]}, definitions, {"allOf": [{"anyOf": [a, inner]}, b]}):
        assert accepts(joined, both) and not accepts(joined, more), joined
    for alone in ({"allOf": [a]}, {**a, "allOf": [{"required": ["a"]}]}, {"anyOf": [a, inner]}):
        assert accepts(alone, '{"a":true}') and not accepts(alone, '{"a":true,"z":1}'), alone


def test_an_end_token_beyond_the_tokenizer_is_left_out() -> None:
    """The default end token of GPT-2's configuration, 50256, is such a token if the tokenizer is smaller."""
    tokenizer = byte_level_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="a{3}"))
    for token in (len(tokenizer) + 1, 50256):
        model = text_model(tokenizer)
        model.generation_config.eos_token_id = token
        with LLM(model, tokenizer=tokenizer, check_at_load=False) as llm:
            assert llm.generate("a", params)[0].outputs[0].text == "aaa"


def test_complete_structure_ends_despite_min_tokens_and_ignore_eos() -> None:
    tokenizer = byte_level_tokenizer()
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        min_tokens=20,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
    )
    with LLM(text_model(tokenizer), tokenizer=tokenizer, check_at_load=False) as llm:
        (output,) = llm.generate("a", params)
    assert output.outputs[0].text in ("yes", "no")
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "wrong",
    [
        StructuredOutputsParams(json={"type": "nothing"}),
        StructuredOutputsParams(json="{"),
        StructuredOutputsParams(json={"type": {1, 2}}),
        StructuredOutputsParams(regex="(a"),
        StructuredOutputsParams(grammar="start: other"),
    ],
)
def test_structures_that_cannot_be_compiled_are_refused(wrong: StructuredOutputsParams) -> None:
    tokenizer = byte_level_tokenizer()
    with LLM(text_model(tokenizer), tokenizer=tokenizer, check_at_load=False) as llm:
        with pytest.raises(RequestError, match="structured_outputs cannot be compiled: .") as raised:
            llm.generate("a", SamplingParams(structured_outputs=wrong))
        assert raised.value.parameter == "structured_outputs"
        assert llm.generate("a", SamplingParams(max_tokens=2, temperature=0))[0].finished
    with LLM(text_model(tokenizer), check_at_load=False) as llm, pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate([3], SamplingParams(structured_outputs=KINDS[0]))


def test_a_large_schema_is_compiled_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests get all their tokens while one waits for its schema."""
    tokenizer = byte_level_tokenizer()

    async def main() -> None:
        engine = AsyncLLMEngine.from_model(
            text_model(tokenizer), tokenizer=tokenizer, check_at_load=False, kv_cache_tokens=512
        )
        await engine.start()
        compiles, may_end = asyncio.Event(), threading.Event()
        loop, constraints = asyncio.get_running_loop(), engine._engine.constraints
        compile_now = constraints.compile

        def compile_slowly(params: Any) -> Any:
            loop.call_soon_threadsafe(compiles.set)
            assert may_end.wait(240)
            return compile_now(params)

        monkeypatch.setattr(constraints, "compile", compile_slowly)
        yes = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes"]))
        slow = asyncio.ensure_future(anext(engine.stream("a", yes.replace(ignore_eos=True))))
        await compiles.wait()
        other = [output async for output in engine.stream("b", SamplingParams(max_tokens=5, ignore_eos=True))]
        assert other[-1].finished and not slow.done()
        may_end.set()
        text = (await slow).outputs[0].text
        assert text and "yes".startswith(text)
        await engine.shutdown()

    asyncio.run(main())


def test_an_expression_that_grows_without_bound_fails_its_request_alone() -> None:
    tokenizer = byte_level_tokenizer()
    with LLM(text_model(tokenizer), tokenizer=tokenizer, check_at_load=False, kv_cache_tokens=512) as llm:
        huge = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(regex="a{999999999}"))
        first, second = llm.generate(["x", "x"], [huge, SamplingParams(max_tokens=5, ignore_eos=True)])
    assert first.is_request_error and "structured_outputs" in str(first.error)
    assert len(second.outputs[0].token_ids) == 5
