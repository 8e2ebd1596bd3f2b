"""Offline inference: prompts in, answers out, with the interface of vLLM's `LLM`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, TypedDict, TypeVar, cast

import torch
from torch import nn

from windlass.base.errors import RequestError
from windlass.inference.beam_search import BeamSearchOutput, search_beams
from windlass.inference.chat_template import with_content_form
from windlass.inference.embeddings import embed_prompts
from windlass.inference.engine_factory import make_rank_engine
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.lora_request import LoRARequest
from windlass.inference.outputs import EmbeddingOutput, EmbeddingRequestOutput, EngineStats, RequestOutput
from windlass.inference.rank_worker import RankWorker
from windlass.inference.sampling_params import BeamSearchParams, SamplingParams
from windlass.inference.sharded_runner import ShardedRunner

T = TypeVar("T")

_PROMPT_KEYS = ("prompt", "prompt_token_ids")

_NOT_BUILT = {
    "encode": "use embed for one vector of each prompt",
    "classify": "windlass serves causal language models; use the module's own forward",
    "score": "compare the vectors of embed",
    "reward": "windlass serves causal language models; use the module's own forward",
    "sleep": "use close, and build another LLM later",
    "wake_up": "use close, and build another LLM later",
    "apply_model": "pass a module to LLM, and call that",
    "collective_rpc": "with tp every rank runs the script, so call the function there",
    "start_profile": "use windlass profile",
    "stop_profile": "use windlass profile",
    "llm_engine": "use engine, stats, tokenizer and max_model_len",
}
"""Members of vLLM's class that this class lacks, and what to use instead."""


class TextPrompt(TypedDict):
    """Prompt as a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """Prompt as token ids."""

    prompt_token_ids: Sequence[int]


Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with `prompt` or `prompt_token_ids`."""

Adapter = str | LoRARequest
"""Name of a LoRA adapter that is loaded, or its name and directory."""


class LLM:
    """Model with an inference engine. Calls of several threads are serialized.

    With `tp`, `ep` or `pp` above 1 all ranks make the same calls, and each group of `tp * ep * pp` consecutive ranks
    holds one model. Only the prompts of a model's first rank are used, and all its ranks receive the outputs.

    Args:
        model: directory of a causal language model, a GGUF file, a name on the hub, or a module, which is served in
            place, and sharded if there are several ranks.
        tokenizer: tokenizer of transformers, or its directory; None: that of the model's directory, none for a module.
        device: device of a model that is loaded; None: this rank's device.
        dtype: dtype of the weights: `auto`, `fp32`, `bf16`, ... or a torch dtype.
        trust_remote_code: run Python files that come with the model.
        skip_tokenizer_init: leave out the tokenizer of the model's directory; prompts are token ids then.
        options: see `EngineOptions`.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded or served.
        ConfigError: an option is not known, is out of range, or contradicts another option or the model; or the number
            of ranks is not a multiple of `tp * ep * pp`.
        StorageError: the weight file or `swap_directory` cannot be used.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        device: torch.device | str | None = None,
        dtype: str | torch.dtype = "auto",
        trust_remote_code: bool = False,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> None:
        self._engine: Any = make_rank_engine(
            model,
            EngineOptions.from_arguments(**options),
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            skip_tokenizer=skip_tokenizer_init,
        )
        self._begin()

    def _begin(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    @classmethod
    def from_engine(cls, engine: LLMEngine | RankWorker) -> LLM:
        """Return an `LLM` that uses an existing engine, or this rank's existing worker."""
        made = cls.__new__(cls)
        made._engine = engine
        made._begin()
        return made

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_BUILT:
            raise AttributeError(f"windlass.LLM has no {name!r}: {_NOT_BUILT[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of transformers, or None."""
        return self._engine.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of transformers, or None."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of a prompt and its answer together."""
        return int(self._engine.max_model_len)

    @property
    def engine(self) -> Any:
        """The `LLMEngine`, for code that runs its steps; on all ranks of a model but the first, a `RankWorker`."""
        return self._engine

    def get_default_sampling_params(self) -> SamplingParams:
        """Return `SamplingParams()`."""
        return SamplingParams()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Adapter | Sequence[Adapter | None] | None = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate answers to all prompts, batched continuously.

        Args:
            prompts: one or several; see `Prompt`.
            sampling_params: one for all, or one for each; None: `SamplingParams()`.
            lora_request: adapter of all prompts, or of each; see `Adapter`.
            priority: priority of each prompt; lower values run first.
            use_tqdm: show the progress.

        Returns:
            One output for each prompt, in the order of the prompts; `error` is set if the request failed.

        Raises:
            RequestError: a prompt or a parameter cannot be served; nothing was generated.
            ModelError: an adapter cannot be read, or does not fit the model; nothing was generated.
        """
        return self._on_leader(
            lambda: self._generate(prompts, sampling_params, lora_request, priority, show_progress=use_tqdm)
        )

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: Adapter | Sequence[Adapter | None] | None,
        priority: Sequence[int] | None,
        *,
        show_progress: bool,
    ) -> list[RequestOutput]:
        listed = _as_list(prompts)
        params = _spread("sampling_params", sampling_params, len(listed)) or [SamplingParams()] * len(listed)
        given = _spread("lora_request", lora_request, len(listed)) or [None] * len(listed)
        adapters = [self._load_adapter(one) for one in given]
        priorities = list(priority) if priority is not None else [0] * len(listed)
        if len(priorities) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts got {len(priorities)} priorities; give one for each", parameter="priority"
            )
        ids = [f"generate-{next(self._numbers)}" for _ in listed]
        try:
            for request_id, prompt, one, adapter, rank in zip(ids, listed, params, adapters, priorities, strict=True):
                self._engine.add_request(request_id, _prompt_of(prompt), one, lora_name=adapter, priority=rank)
            finished = self._run(len(ids), show_progress=show_progress)
        except BaseException:
            for request_id in ids:
                self._engine.cancel(request_id)
            raise
        return [finished[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template_content_format: str = "auto",
        **arguments: Any,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of several, by a chat template.

        Args:
            messages: a conversation or a list of several. A conversation is a list of dicts with `role` and `content`,
                which is a text, or a list of parts of the type `text`. Arguments of `tool_calls` are objects, or JSON.
            chat_template: template in Jinja, or the name of one of the tokenizer's; None: that of the tokenizer.
            add_generation_prompt: end the prompt with the header of the assistant's message.
            continue_final_message: continue the last message in place of a new one; needs
                `add_generation_prompt=False`.
            tools: functions that the template shows to the model, in OpenAI's form.
            chat_template_kwargs: values that the template reads.
            chat_template_content_format: `string` passes contents as texts, `openai` as parts, and `auto` as the
                template reads them.
            arguments: further arguments of `generate`.

        Returns:
            One output for each conversation; `prompt` is the text that the template made.

        Raises:
            RequestError: there is no tokenizer or no chat template, a part is not text, arguments of a call are not
                JSON, the content format is unknown, the template raises an error, or a text is not valid Unicode. Other
                errors are those of `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        if self.tokenizer is None or not (chat_template or getattr(self.tokenizer, "chat_template", None)):
            raise RequestError(
                "there is no tokenizer, or the tokenizer has no chat template; load a tokenizer, pass chat_template, "
                "or use generate with a text"
            )
        texts: list[str] = []
        prompts: list[Prompt] = []
        for conversation in conversations:
            listed = [_with_text_parts(message) for message in conversation]
            shown = with_content_form(listed, self.tokenizer, chat_template, chat_template_content_format, tools)
            try:
                text = self.tokenizer.apply_chat_template(
                    shown,
                    chat_template=chat_template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    **(chat_template_kwargs or {}),
                )
            except Exception as error:  # templates raise errors of any kind
                raise RequestError(f"the chat template refuses the messages: {error}", parameter="messages") from error
            texts.append(text)
            try:
                prompts.append(self.tokenizer(text, add_special_tokens=False).input_ids)
            except (TypeError, UnicodeError) as error:  # a lone surrogate, as in a text of `generate`
                raise RequestError(f"a message is not valid Unicode text: {error}", parameter="messages") from error
        outputs = self.generate(prompts, sampling_params, **arguments)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search for the likeliest answers to each prompt by beams. Errors are those of `search_beams`.

        Returns:
            One output for each prompt, with its sequences in order, the best one first.
        """
        return self._on_leader(
            lambda: [search_beams(self._engine, _prompt_of(prompt), params) for prompt in _as_list(prompts)]
        )

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = False) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt: the last hidden state of its last token, divided by its L2 norm.

        Args:
            use_tqdm: not used.

        Raises:
            RequestError: the model cannot embed, or a prompt is empty or too long.
        """

        def embed() -> list[EmbeddingRequestOutput]:
            encoded = [list(self._engine.encode(_prompt_of(prompt))[1]) for prompt in _as_list(prompts)]
            found = zip(embed_prompts(self._engine, encoded), encoded, strict=True)
            return [
                EmbeddingRequestOutput(f"embed-{next(self._numbers)}", EmbeddingOutput(vector), ids)
                for vector, ids in found
            ]

        return self._on_leader(embed)

    def stats(self) -> EngineStats:
        """Return counters and gauges of the engine."""
        return self._on_leader(lambda: cast(EngineStats, self._engine.stats()))

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes after a change of weights. Pack the weights again if a module is served in place."""
        self._on_leader(lambda: self._engine.clear_prefix_cache())

    def close(self) -> None:
        """Cancel all requests, free the KV cache, and restore the attention function of a module that was passed in.

        On all ranks of a model but the first, wait until the first rank closes the engine.
        """
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_leader(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank of the model, and return its result on all ranks of the model."""
        engine = self._engine
        with self._lock:
            if isinstance(engine, RankWorker):
                return cast(T, engine.take_part())
            if isinstance(engine.runner, ShardedRunner):
                return engine.runner.share(function)
            return function()

    def _load_adapter(self, adapter: Adapter | None) -> str | None:
        """Load the adapter of a `LoRARequest` unless an adapter of this name is loaded. Return the name.

        Raises:
            RequestError: an adapter of this name was loaded from another directory.
        """
        if not isinstance(adapter, LoRARequest):
            return adapter
        name = adapter.lora_name
        if name not in self._engine.lora_names:
            self._engine.add_lora(name, adapter.lora_path)
        loaded = self._engine.lora_directory(name)
        if loaded is not None and loaded != Path(adapter.lora_path).resolve():
            raise RequestError(
                f"the adapter {name!r} was loaded from {loaded}, and lora_path is {adapter.lora_path}; use "
                "another name",
                parameter="lora_request",
            )
        return name

    def _run(self, count: int, *, show_progress: bool) -> dict[str, RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        progress: Any = None
        if show_progress:
            from rich.console import Console
            from rich.progress import Progress

            console = Console(stderr=True)  # stdout is for the script
            progress = Progress(transient=True, console=console, disable=not console.is_terminal)
            progress.start()
            task = progress.add_task("generating", total=count)
        try:
            while self._engine.has_requests():
                for output in self._engine.step():
                    finished[output.request_id] = output
                    if progress is not None:
                        progress.advance(task)
        finally:
            if progress is not None:
                progress.stop()
        return finished


def _as_list(prompts: Any) -> list[Prompt]:
    if hasattr(prompts, "tolist"):  # an array or a tensor of tokens
        prompts = prompts.tolist()
    if not isinstance(prompts, (str, Mapping, Iterable)):
        raise RequestError(f"prompts is {prompts!r}; give a text, token ids, or a list of them", parameter="prompt")
    if isinstance(prompts, (str, bytes, Mapping)):
        return [cast(Prompt, prompts)]
    listed = list(prompts)
    single = bool(listed) and isinstance(listed[0], SupportsIndex) and not hasattr(listed[0], "__len__")
    return [listed] if single else listed


def _prompt_of(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    others = sorted(str(name) for name, value in prompt.items() if name not in _PROMPT_KEYS and value is not None)
    if others:
        raise RequestError(
            f"a prompt has the key {others[0]!r}; give only prompt or prompt_token_ids", parameter="prompt"
        )
    for name in ("prompt_token_ids", "prompt"):
        if prompt.get(name) is not None:
            found: str | Sequence[int] = prompt[name]
            return found
    raise RequestError(f"a prompt has the keys {sorted(prompt)}; give prompt or prompt_token_ids", parameter="prompt")


def _with_text_parts(message: Any) -> Any:
    """Return `message`. If its content is a list, convert each part to a text part.

    Raises:
        RequestError: a part is neither a text nor a refusal.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return message
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise RequestError("a message has a part that is not text; the model takes text only", parameter="messages")
        parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def _spread(name: str, given: Any, count: int) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, (str, SamplingParams, LoRARequest)):
        return [given] * count
    if not isinstance(given, Iterable):
        raise RequestError(f"{name} is {given!r}; give one for all, or one for each", parameter=name)
    found = list(given)
    if len(found) != count:
        raise RequestError(
            f"{count} prompts got {len(found)} {name}; give one for all, or one for each", parameter=name
        )
    return found
