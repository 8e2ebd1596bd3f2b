"""Command `windlass chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from windlass.base.errors import ConfigError, ModelError, RequestError, WindlassError
from windlass.base.printable_console import PrintableConsole
from windlass.base.text import escape_unprintable

if TYPE_CHECKING:
    from windlass.serving.engine_loading import EngineSource
    from windlass.serving.served_engine import ServedEngine

_HELP = "/clear starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    model: Annotated[str, typer.Argument(help="Hugging Face directory or name, or OUT of `windlass train`.")],
    system: Annotated[str | None, typer.Option(help="Instructions to the model before the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer. [what the model can hold]")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(help="Draw among the likeliest tokens that together have this probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Seed of the random draws. [random]")] = None,
    dtype: Annotated[str, typer.Option(help="Weights: auto (as in the files), fp32, bf16 or fp16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache: auto (as the weights), fp32, bf16 or int8.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of the whole conversation. [the model's]")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
) -> None:
    """Talk with MODEL. Each prompt contains the conversation so far; common prefixes are computed once."""
    from windlass.cli.training.run_folder import export_directory_of
    from windlass.inference.sampling_params import SamplingParams
    from windlass.serving.engine_loading import EngineSource

    _check_text(system)
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens)
    directory = str(export_directory_of(Path(model))) if Path(model).is_dir() else model
    options: dict[str, Any] = {
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "max_model_len": max_model_len,
        "trust_remote_code": trust_remote_code,
        "max_sequences": 1,
    }
    console = PrintableConsole(soft_wrap=True, highlight=False, markup=False)
    with asyncio.Runner() as runner:
        engine = _load(EngineSource(directory, options), runner, console)
        try:
            conversation = Conversation(engine, params, system)
            _accept_any_bytes()
            talk(conversation, runner, console, _read_line)
        finally:
            runner.run(engine.shutdown(drain=False))


def _load(source: EngineSource, runner: asyncio.Runner, console: Console) -> ServedEngine:
    try:
        with console.status(f"loading {source.model}"):
            return runner.run(source.load())
    except KeyboardInterrupt:
        # The loading thread may be in native code, where the end of the interpreter would abort the process.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(128 + signal.SIGINT)


class Conversation:
    """Messages so far, and the engine that answers.

    Attributes:
        messages: messages in the form of chat templates; without a chat template, their texts are joined.
        tokens, seconds: number of tokens of the last answer, and the time from its first to its last token.
    """

    def __init__(self, engine: ServedEngine, params: Any, system: str | None) -> None:
        self._engine = engine
        self._params = params
        self._system = system
        self.tokens, self.seconds = 0, 0.0
        self.clear()

    def clear(self) -> None:
        """Delete all messages except the instructions."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    async def answer(self, text: str) -> AsyncIterator[str]:
        """Yield the answer to a message as it grows.

        The received part of a cancelled answer stays in the conversation. A message without any answer is removed:
        templates that require roles to alternate would refuse all later messages.

        Raises:
            RequestError: the conversation is longer than the model can hold, or the chat template refuses it.
            ModelError: the engine has ended the answer, e.g. because its logits are not finite.
            EngineStoppedError: the engine has stopped.
        """
        self.messages.append({"role": "user", "content": text})
        shown = ""
        self.tokens, self.seconds = 0, 0.0
        stream: Any = None
        first = None
        try:
            stream = self._engine.stream(self._prompt(), self._params)
            async for output in stream:
                if output.error is not None:
                    raise (RequestError if output.is_request_error else ModelError)(output.error)
                answer = output.outputs[0]
                now = time.monotonic()
                first = now if first is None else first
                self.tokens, self.seconds = len(answer.token_ids), now - first
                piece, shown = answer.text[len(shown) :], answer.text
                if piece:
                    yield piece
        finally:
            if shown:
                self.messages.append({"role": "assistant", "content": shown})
            else:
                self.messages.pop()
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def _prompt(self) -> str | list[int]:
        from jinja2.exceptions import TemplateError

        from windlass.inference.chat_template import with_content_form

        tokenizer = self._engine.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return "\n".join(message["content"] for message in self.messages)
        try:
            messages = with_content_form(self.messages, tokenizer, None)
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"the chat template raised an error: {error}; use /clear, or leave --system out if the template has no "
                "system role"
            ) from error
        return list(tokenizer.encode(text, add_special_tokens=False))  # templates write special tokens themselves


def talk(
    conversation: Conversation, runner: asyncio.Runner, console: Console, read_line: Callable[[], str | None]
) -> None:
    """Answer each line until `/exit`, `/quit` or the end of input."""
    console.print(_HELP, style="dim")
    while (line := read_line()) is not None:
        text = line.strip()
        if text in ("/exit", "/quit"):
            return
        if text == "/clear":
            conversation.clear()
            console.print("a new conversation starts", style="dim")
        elif text:
            with contextlib.suppress(KeyboardInterrupt):
                runner.run(_show_answer(conversation, console, text))


async def _show_answer(conversation: Conversation, console: Console, text: str) -> None:
    stopped = ""
    answer = conversation.answer(text)
    try:
        async for piece in answer:
            console.out(escape_unprintable(piece), end="", highlight=False)
    except asyncio.CancelledError:
        stopped = ", stopped"
        raise
    except WindlassError as error:
        console.print(str(error), style="red")
    finally:
        await answer.aclose()  # type: ignore[attr-defined]
        speed = f", {(conversation.tokens - 1) / conversation.seconds:.1f} tokens/s" if conversation.seconds else ""
        console.print(f"\n[{conversation.tokens} tokens{speed}{stopped}]", style="dim")


def _check_text(system: str | None) -> None:
    """Check that the value of `--system` is valid UTF-8.

    Raises:
        ConfigError: the value is not valid UTF-8.
    """
    try:
        (system or "").encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--system is {system!r}, which is not valid UTF-8; write text") from error


def _accept_any_bytes() -> None:
    """Decode bytes of standard input that are not valid text as replacement characters."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def _read_line() -> str | None:
    """Return the next line of the user; None at the end of input. Ctrl-C empties the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
