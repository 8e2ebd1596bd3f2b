"""Tests of the commands `windlass serve` and `windlass chat` without a real model."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.hf_models import t5
from tests.serving.fake_engine import CharacterTokenizer, FakeEngine
from tests.serving.tiny_model import make_byte_tokenizer
from windlass import LLM
from windlass.base.errors import ConfigError, ModelError
from windlass.cli.chat import Conversation, _accept_any_bytes, _read_line, talk
from windlass.cli.main import main
from windlass.cli.serve import _read_template
from windlass.inference.model_loading import load_tokenizer_of
from windlass.inference.sampling_params import SamplingParams


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Directory that looks like a model; loading it would fail."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("not json")
    return directory


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--kv-dtype", "fp64"], "kv_dtype is 'fp64'"),
        (["--dtype", "fp7"], "dtype is 'fp7'"),
        (["--policy", "fifo"], "policy is 'fifo'"),
        (["--max-sequences", "0"], "max_sequences is 0"),
        (["--max-sequences", "600"], "more than max_tokens_per_step"),
        (["--max-gap-ms", "-1"], "max_gap_ms is -1"),
        (["--tool-calls", "xml"], "--tool-calls is 'xml'"),
        (["--max-body-bytes", "3"], "--max-body-bytes is 3"),
        (["--drain-timeout", "-1"], "--drain-timeout is -1"),
        (["--drain-timeout", "nan"], "--drain-timeout is nan"),
        (["--max-output-tokens", "0"], "--max-output-tokens is 0"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--lora", "name"], "write NAME=DIRECTORY"),
        (["--lora", "a=/nowhere"], "has no adapter_config.json"),
        (["--lora", "model=/nowhere"], "used twice"),
        (["--api-key-file", "/nowhere"], "/nowhere"),
        (["--chat-template", "/nowhere"], "/nowhere"),
        (["--host", "203.0.113.1", "--port", "0"], "cannot listen on 203.0.113.1"),
        (["--host", "no host"], "'no host' cannot be resolved"),
    ],
)
def test_options_are_checked_before_the_model_is_loaded(
    model: Path, options: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("serve", str(model), *options) == 1
    error = capsys.readouterr().err
    assert part in error and error.startswith("windlass: ") and error.count("\n") == 1


def test_a_directory_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("serve", str(tmp_path)) == 1
    assert "is not a model: it has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_name_that_is_neither_a_directory_nor_on_the_hub(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "runs/absent") == 1
    error = capsys.readouterr().err
    assert "cannot load the model of runs/absent: " in error
    assert error.endswith("no such directory exists: check the path, or the name on the hub\n")


def test_the_default_address_is_loopback(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(host: str, port: int) -> None:
        raise ConfigError(f"bound to {host}:{port}")

    monkeypatch.setattr("windlass.serving.http_server.bind_socket", refuse)
    assert call("serve", str(model)) == 1
    assert capsys.readouterr().err == "windlass: bound to 127.0.0.1:8000\n"


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    assert call("serve", str(tmp_path), "--port", "0") == 1
    message = (
        f"{tmp_path} is an encoder-decoder (t5); windlass serves causal language models, which have only a decoder"
    )
    assert capsys.readouterr().err.endswith(f"windlass: {message}\n")
    for options in ({}, {"skip_tokenizer_init": True}):
        with pytest.raises(ModelError, match=re.escape(message)):
            LLM(tmp_path, **options)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder; windlass serves"):
        LLM(t5(), skip_tokenizer_init=True)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])  # transformers loads the last two with an empty vocabulary
def test_a_model_without_a_tokenizer(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert call("serve", str(tmp_path), "--port", "0") == 1
    error = capsys.readouterr().err
    assert f"windlass: cannot load the tokenizer of {tmp_path}: the directory has none of its files (tokenizer" in error
    assert "copy the tokenizer's files of the original model there, or give their directory as tokenizer" in error
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(ModelError, match="its vocabulary is empty; copy the tokenizer's files"):
        load_tokenizer_of(tmp_path)


def test_a_tokenizer_without_a_list_of_added_tokens_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer(CharacterTokenizer):
        @property
        def added_tokens_decoder(self) -> Any:
            raise NotImplementedError("MistralCommonBackend does not implement it")

        def __call__(self, text: str) -> Any:
            return SimpleNamespace(input_ids=self.encode(text))

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **options: Tokenizer())
    assert isinstance(load_tokenizer_of(tmp_path), Tokenizer)


def test_a_tokenizer_in_a_directory_of_its_own(tmp_path: Path) -> None:
    make_byte_tokenizer().save_pretrained(tmp_path)
    assert len(load_tokenizer_of(tmp_path)) == 258
    with pytest.raises(ModelError, match=r"nowhere is not a directory; give one with tokenizer\.json"):
        load_tokenizer_of(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"# only a comment\n", b"\xff\n", b"x" * 2**21])
def test_a_key_file_without_keys(
    model: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    assert call("serve", str(model), "--api-key-file", str(path)) == 1
    assert f"--api-key-file {path}" in capsys.readouterr().err


def converse(engine: FakeEngine, *lines: str, params: SamplingParams | None = None) -> tuple[str, Conversation]:
    """Return the output of a conversation and its state at the end."""
    output = io.StringIO()
    conversation = Conversation(engine, params or SamplingParams(max_tokens=20), "Be brief.")
    typed: Iterator[str | None] = iter([*lines, None])
    with asyncio.Runner() as runner:
        talk(conversation, runner, Console(file=output, width=200), lambda: next(typed))
    return output.getvalue(), conversation


def test_a_conversation_keeps_its_messages() -> None:
    engine = FakeEngine(answer="yes")
    output, conversation = converse(engine, "one", "  ", "two")
    assert output.count("yes\n[3 tokens") == 2
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "one", "yes", "two", "yes"]
    prompt = engine.tokenizer.decode(engine.seen[1][0])
    assert prompt == "<system>Be brief.<user>one<assistant>yes<user>two<assistant>"


def test_an_answer_that_the_engine_ends_is_an_error_and_leaves_the_conversation_as_it_was() -> None:
    engine = FakeEngine(answer="yes")
    original = engine._state

    def fail(*arguments: Any) -> Any:
        return dataclasses.replace(original(*arguments), error="the highest logit is nan", finished=True)

    engine._state = fail  # type: ignore[method-assign]
    output, conversation = converse(engine, "one")
    assert "the highest logit is nan" in output
    assert [message["content"] for message in conversation.messages] == ["Be brief."]


def test_a_message_without_any_answer_does_not_stay() -> None:
    """The causes are Ctrl-C before the first token, an empty answer, and an engine that has stopped."""
    import _thread

    from windlass.inference.async_engine import EngineStoppedError

    alternate = "{% for message in messages[1:] %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    alternate += "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}{% endfor %}"

    class Failing(FakeEngine):
        async def stream(self, prompt: Any, params: Any, **options: Any) -> Any:
            text = self.tokenizer.decode(prompt)
            if text == "interrupted":
                _thread.interrupt_main()
                await asyncio.sleep(60)
            if text == "stopped":
                raise EngineStoppedError("the inference engine has stopped")
            async for output in super().stream(prompt, params, **options):
                yield output

        def _state(self, *arguments: Any) -> Any:
            output = super()._state(*arguments)
            if self.tokenizer.decode(arguments[1]) == "empty":
                output.outputs[0].text = ""
            return output

    engine = Failing(answer="yes", tokenizer=CharacterTokenizer(chat_template=alternate))
    output, conversation = converse(engine, "interrupted", "empty", "stopped", "one")
    assert "stopped]" in output and "has stopped" in output and "must alternate" not in output
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "one", "yes"]


def test_instructions_that_are_no_text_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("chat", "/nowhere", "--system", "a\udcff") == 1
    assert "--system is 'a\\udcff', which is not valid UTF-8" in capsys.readouterr().err


def test_a_template_that_is_not_jinja_is_an_error_with_its_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "template"
    path.write_text("{{ messages }}\n{% generation %}{% endgeneration %}{% for one in messages %}\n{% endif %}")
    assert call("serve", str(model), "--chat-template", str(path)) == 1
    assert f"--chat-template {path} is not Jinja at line 3: " in capsys.readouterr().err


def test_a_byte_order_mark_is_not_a_part_of_a_template(tmp_path: Path) -> None:
    path = tmp_path / "template"
    path.write_bytes("\N{BOM}{{ messages }}".encode())
    assert _read_template(path) == "{{ messages }}"


def test_commands_of_a_conversation() -> None:
    output, conversation = converse(FakeEngine(answer="yes"), "one", "/clear", "two", "/exit", "three")
    assert output.count("yes") == 2 and "a new conversation starts" in output
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "two", "yes"]


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    output, _ = converse(FakeEngine(answer="a\x1b[31mb"), "one")
    assert "\x1b" not in output and "\\x1b" in output


def test_ctrl_c_stops_an_answer_and_keeps_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    import _thread

    engine = FakeEngine(answer="abcdefgh", step_seconds=0.01)
    original = engine._state

    def interrupt_at_three(*arguments: Any) -> Any:
        if arguments[3] == 3 and not engine.finished:
            _thread.interrupt_main()
        return original(*arguments)

    engine._state = interrupt_at_three  # type: ignore[method-assign]
    output, conversation = converse(engine, "one", "two")
    assert "stopped]" in output and output.count("[8 tokens") == 1
    contents = [message["content"] for message in conversation.messages]
    assert contents[2] in ("abc", "abcd") and contents[3:] == ["two", "abcdefgh"]
    assert engine.finished == {"abort": 1, "stop": 1} and not engine.running


def test_a_conversation_that_is_too_long_is_an_error_of_that_message() -> None:
    class Full(FakeEngine):
        async def stream(self, prompt: Any, params: Any, **options: Any) -> Any:
            from windlass.base.errors import RequestError

            if len(prompt) > 60:
                raise RequestError("the prompt is too long; use /clear")
            async for output in super().stream(prompt, params, request_id="one", **options):
                yield output

    output, conversation = converse(Full(answer="yes"), "x" * 100, "short")
    assert "the prompt is too long" in output and "yes" in output
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "short", "yes"]


def test_a_model_without_a_chat_template_continues_the_text() -> None:
    engine = FakeEngine(answer="yes", tokenizer=CharacterTokenizer(chat_template=None))
    _, conversation = converse(engine, "one")
    assert conversation.messages[-1]["content"] == "yes"


def test_a_template_that_refuses_the_messages_is_an_error_of_that_message() -> None:
    template = "{% for message in messages %}{% if 'bad' in message.content %}{{ raise_exception('no bad words') }}"
    template += "{% endif %}{{ message.content }}{% endfor %}"
    engine = FakeEngine(answer="yes", tokenizer=CharacterTokenizer(chat_template=template))
    output, conversation = converse(engine, "bad", "good")
    assert "no bad words" in output and "yes" in output
    assert [message["content"] for message in conversation.messages] == ["Be brief.", "good", "yes"]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # error handlers that Python selects by locale
def test_typed_bytes_that_are_no_text_become_replacements(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"a\xffb\n"), "utf-8", errors)
    monkeypatch.setattr("sys.stdin", typed)
    _accept_any_bytes()
    assert _read_line() == "a\N{REPLACEMENT CHARACTER}b"
