"""Experiment of `windlass bench serve --workload load`: `windlass serve` under cancelled, malformed and long requests.

About a third of the requests is cancelled during its stream, a tenth is malformed, and one request has a prompt of
10,000 tokens. No request may be lost and no KV block may leak; growth of resident memory is only reported. Before
the load, short requests are timed on an idle server, and then while long prompts are computed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from windlass.base.errors import WindlassError
from windlass.base.garbage_collection import freeze_live_objects
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.line_chart import LinePanel, draw_lines
from windlass.cli.benches.server_under_test import ServerUnderTest
from windlass.cli.benches.service_level import percentile
from windlass.cli.benches.serving_models import VOCABULARY, make_random_llama
from windlass.cli.training.model_builder import declared_vocab_size
from windlass.cli.training.run_folder import export_directory_of

_LONG_PROMPT = 10_000
_SHORT_PROMPT, _SHORT_ANSWER = 128, 8
_LONGEST_ANSWER = 48
_SMALLEST_WINDOW = 1024  # enough tokens for a short prompt and a cancelled answer of 400 tokens
_FLAT_BYTES = 32 << 20  # largest growth of resident memory that still counts as flat
_GOAL_WAIT = 3.0
_START_SECONDS = 120
_MALFORMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("temperature", {"temperature": -1}),
    ("max_tokens", {"max_tokens": -5}),
    ("unknown field", {"extra_body": {"no_such_field": 1}}),
    ("token", {"prompt": [2**31 - 1]}),
    ("empty prompt", {"prompt": []}),
    ("model", {"model": "no-such-model"}),
    ("schema", {"extra_body": {"structured_outputs": {"json": {"type": "nonsense"}}}}),
)


@dataclass(frozen=True)
class LoadSettings:
    """Settings of the experiment.

    Attributes:
        model: directory; None: a random Llama of `hidden` and `layers`.
        requests: number of requests of the load.
        clients: number of clients of the load, at the same time.
        short_requests: number of short requests that are timed alone, and again while long prompts are computed.
        max_gap_ms: value of the server's option `--max-gap-ms`.
        long_prompt: tokens of a long prompt.
        vocabulary: size of the vocabulary from which prompts are drawn.
    """

    model: Path | None = None
    hidden: int = 512
    layers: int = 8
    requests: int = 1000
    clients: int = 64
    short_requests: int = 100
    max_gap_ms: float = 20.0
    long_prompt: int = _LONG_PROMPT
    vocabulary: int = VOCABULARY

    def fitted(self, vocabulary: int, window: int) -> LoadSettings:
        """Return the settings with prompts that fit a model's vocabulary and window of tokens.

        Raises:
            WindlassError: the model's window is too small for the load.
        """
        if window < _SMALLEST_WINDOW:
            raise WindlassError(
                f"--model {self.model} takes {window:,} tokens; this workload needs {_SMALLEST_WINDOW:,}; choose "
                "another model"
            )
        return replace(self, vocabulary=vocabulary, long_prompt=min(self.long_prompt, window - _LONGEST_ANSWER))


@dataclass
class LoadOutcome:
    """Results of the load.

    Attributes:
        counts: requests by outcome.
        lost: descriptions of requests that got another outcome than expected.
        first_tokens: seconds to the first token of each streamed request.
        memory: pairs of time in seconds and resident bytes of the server, about every half second.
        seconds: duration of the load.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0


def run_load_bench(settings: LoadSettings, out: Path) -> bool:
    """Run the experiment; print conclusions, write the JSON file and the picture.

    Returns:
        True if no request was lost or is left in the server, no KV block leaked, and the server's exit code is 0.

    Raises:
        WindlassError: the package `openai` is missing, the server or a client process fails, or the model's window is
            too small.
    """
    try:
        import openai  # noqa: F401
    except ImportError:
        raise WindlassError("this workload uses OpenAI's client: pip install openai") from None
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = settings.model or make_random_llama(Path(folder), settings.hidden, settings.layers)
        cache = 4 * settings.long_prompt + settings.clients * 512
        arguments = ["--max-gap-ms", str(settings.max_gap_ms), "--kv-cache-tokens", str(cache)]
        arguments += ["--served-model-name", "bench", "--max-sequences", str(settings.clients)]
        server = ServerUnderTest(model, arguments, out / "server.log")
        try:
            vocabulary = declared_vocab_size(str(export_directory_of(model).absolute())) or VOCABULARY
            settings = settings.fitted(vocabulary, server.max_model_len())
            measured = asyncio.run(_drive(server, settings))
            code = server.stop()
        finally:
            server.process.kill()
    return _report(settings, measured, code, out)


async def _drive(server: ServerUnderTest, settings: LoadSettings) -> dict[str, Any]:
    import openai

    client = openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=600)
    with Progress(console=bench_console(), transient=True) as progress:
        task = progress.add_task("short requests alone", total=2 * settings.short_requests + settings.requests)
        for seed in range(3):
            await _short(client, 10**6 + seed, settings.vocabulary)  # warms up
        freeze_live_objects()  # garbage collection would count as time of the server
        vocabulary = settings.vocabulary
        idle = [await _timed_short(client, seed, vocabulary, progress, task) for seed in range(settings.short_requests)]
        progress.update(task, description="short requests beside long prompts")
        senders = _LongPromptSenders(server.address, settings)
        try:
            await senders.wait_until_started()
            await asyncio.sleep(0.5)
            seeds = range(settings.short_requests, 2 * settings.short_requests)
            beside = [await _timed_short(client, seed, vocabulary, progress, task) for seed in seeds]
            computed = await senders.stop()
        finally:
            senders.kill()
        progress.update(task, description=f"{settings.requests} requests, {settings.clients} at a time")
        before = server.metrics()
        outcome = LoadOutcome()
        sampling = asyncio.create_task(_sample_memory(server, outcome))
        began = time.perf_counter()
        numbers = iter(range(settings.requests))

        async def run_client() -> None:
            for number in numbers:
                await _one_request(client, settings, number, outcome)
                progress.advance(task)

        await asyncio.gather(*(run_client() for _ in range(settings.clients)))
        outcome.seconds = time.perf_counter() - began
        sampling.cancel()
        after = await _wait_until_idle(server)
    await client.close()
    return {
        "idle": idle,
        "beside": beside,
        "long_prompts": computed,
        "outcome": outcome,
        "metrics": {name: after[name] - before.get(name, 0.0) for name in after},
        "after": after,
        "memory_after": server.memory(),
    }


def _prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    """Return random token ids, without the first ids of the vocabulary (special tokens and single bytes)."""
    r = random.Random(seed)
    return [r.randrange(min(300, vocabulary // 2), vocabulary) for _ in range(length)]


async def _short(client: Any, seed: int, vocabulary: int) -> float:
    """Send a short request and read all of its answer. Return the seconds to its first token."""
    began = time.perf_counter()
    first = 0.0
    stream = await client.completions.create(
        model="bench",
        prompt=_prompt(_SHORT_PROMPT, seed, vocabulary),
        max_tokens=_SHORT_ANSWER,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        first = first or time.perf_counter() - began
    return first


async def _timed_short(client: Any, seed: int, vocabulary: int, progress: Progress, task: Any) -> float:
    first = await _short(client, seed, vocabulary)
    progress.advance(task)
    # pause for a random time, so that requests arrive at any moment of a step
    await asyncio.sleep(random.Random(seed).random() * 0.05)
    return first


class _LongPromptSenders:
    """Two processes, each of which sends long prompts until it is stopped.

    The client needs a tenth of a second of Python for 10,000 token ids. In this process, that would be counted as a
    waiting time of the short requests.
    """

    def __init__(self, address: str, settings: LoadSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._started, self._stopping, self._sent = context.Semaphore(0), context.Event(), context.SimpleQueue()
        shared = self._started, self._stopping, self._sent
        self._processes = [
            context.Process(target=_send_long_prompts, args=(address, settings, number, *shared), daemon=True)
            for number in range(2)
        ]
        for process in self._processes:
            process.start()

    async def wait_until_started(self) -> None:
        """Wait until both processes are about to send their first prompt.

        Raises:
            WindlassError: a process has not started within two minutes.
        """
        for _ in self._processes:
            if not await asyncio.to_thread(self._started.acquire, timeout=_START_SECONDS):
                raise WindlassError(f"a client of long prompts has not started within {_START_SECONDS} s; see above")

    async def stop(self) -> int:
        """Wait for the last answers, and return the number of prompts that were computed.

        Raises:
            WindlassError: a process has failed.
        """
        self._stopping.set()
        for process in self._processes:
            await asyncio.to_thread(process.join)
            if process.exitcode:
                raise WindlassError(f"a client of long prompts ended with exit code {process.exitcode}; see above")
        return sum(self._sent.get() for _ in self._processes)

    def kill(self) -> None:
        """End the processes if they still run."""
        for process in self._processes:
            process.kill()
            process.join()


def _send_long_prompts(
    address: str, settings: LoadSettings, number: int, started: Any, stopping: Any, sent: Any
) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)
    started.release()
    count = 0
    while not stopping.is_set():
        prompt = _prompt(settings.long_prompt, 10**7 + 1000 * number + count, settings.vocabulary)
        client.completions.create(model="bench", prompt=prompt, max_tokens=4)
        count += 1
    sent.put(count)


async def _one_request(client: Any, settings: LoadSettings, number: int, outcome: LoadOutcome) -> None:
    """Send request `number` of the load, and compare its outcome with the expected one."""
    import openai

    r = random.Random(number)
    answer = r.randrange(8, _LONGEST_ANSWER + 1)
    prompt: list[int] = _prompt(r.randrange(8, 193), number, settings.vocabulary)
    if number == settings.requests // 2:
        prompt = _prompt(settings.long_prompt, number, settings.vocabulary)
    fields: dict[str, Any] = {"model": "bench", "prompt": prompt, "max_tokens": answer, "temperature": 0}
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
    kind, expected = "whole", "whole"
    if number % 10 == 9:
        name, wrong = _MALFORMED[number // 10 % len(_MALFORMED)]
        kind, expected = f"malformed ({name})", "refused"
        fields |= wrong
    elif number % 3 == 0 and len(prompt) < settings.long_prompt:
        kind = expected = "cancelled"
        fields["max_tokens"] = 400
    try:
        found = await _read(client, fields, r.randrange(1, 6) if expected == "cancelled" else None, outcome)
    except openai.APIStatusError as error:
        found = "refused" if error.status_code in (400, 404, 422) else f"status {error.status_code}"
    except (openai.OpenAIError, OSError) as error:
        found = f"{type(error).__name__}: {error}"
    outcome.counts[found] += 1
    # A client that reads slowly may get several tokens in an event, so that the stream ends before it is cancelled.
    if found != expected and not (expected == "cancelled" and found == "whole"):
        outcome.lost.append(f"request {number}, {kind}: {found}")


async def _read(client: Any, fields: dict[str, Any], stops_after: int | None, outcome: LoadOutcome) -> str:
    """Read a stream, or only its first `stops_after` events; return the outcome."""
    began, events, usage, reason = time.perf_counter(), 0, None, None
    stream = await client.completions.create(**fields)
    async for event in stream:
        if not events:
            outcome.first_tokens.append(time.perf_counter() - began)
        events += 1
        usage = event.usage or usage
        reason = next((choice.finish_reason for choice in event.choices if choice.finish_reason), reason)
        if stops_after is not None and events >= stops_after:
            await stream.close()
            return "cancelled"
    if usage is None or usage.completion_tokens != fields["max_tokens"] or reason != "length":
        return f"ended with {usage and usage.completion_tokens} of {fields['max_tokens']} tokens, reason {reason}"
    return "whole"


async def _sample_memory(server: ServerUnderTest, outcome: LoadOutcome) -> None:
    began = time.perf_counter()
    while True:
        outcome.memory.append((time.perf_counter() - began, server.memory()["VmRSS"]))
        await asyncio.sleep(0.5)


async def _wait_until_idle(server: ServerUnderTest) -> dict[str, float]:
    """Return the metrics once no request runs or waits, or after 30 seconds."""
    found: dict[str, float] = {}
    for _ in range(300):
        found = await asyncio.to_thread(server.metrics)
        if not found["vllm:num_requests_running"] and not found["vllm:num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    return found


def _report(settings: LoadSettings, measured: dict[str, Any], code: int, out: Path) -> bool:
    outcome: LoadOutcome = measured["outcome"]
    after = measured["after"]
    idle, beside = percentile(measured["idle"], 0.99), percentile(measured["beside"], 0.99)
    tail = [size for second, size in outcome.memory if second >= 0.3 * outcome.seconds]
    growth = (measured["memory_after"]["VmRSS"] - tail[0]) if tail else 0
    leaked = after["vllm:kv_cache_usage_perc"] * after["windlass:kv_blocks"]
    left = after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"]
    conclusions = [
        f"{settings.requests} requests from {settings.clients} clients in {outcome.seconds:.1f} s: "
        + ", ".join(f"{count} {name}" for name, count in outcome.counts.most_common()),
        f"lost: {len(outcome.lost)}" + "".join(f"; {line}" for line in outcome.lost[:5]),
        f"requests left in the server: {left:.0f}; KV blocks left in use: {leaked:.0f} of "
        f"{after['windlass:kv_blocks']:.0f}",
        f"resident memory: {growth / 1e6:+.1f} MB from 30 % of the load to its end "
        f"({'flat' if growth <= _FLAT_BYTES else 'GROWING'}; {measured['memory_after']['VmRSS'] / 1e6:.0f} MB)",
        f"first token of short requests, P99: alone {idle * 1e3:.1f} ms, beside {measured['long_prompts']} prompts of "
        f"{settings.long_prompt} tokens {beside * 1e3:.1f} ms: {beside / idle:.2f} x (goal {_GOAL_WAIT:.0f})",
        f"exit code after SIGTERM: {code}",
    ]
    console = bench_console()
    for line in conclusions:
        console.print(line, soft_wrap=True)
    stored = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    written = write_result(
        out / "load.json",
        {
            "bench": "serve load",
            "settings": stored,
            "outcomes": dict(outcome.counts),
            "lost": outcome.lost,
            "seconds": outcome.seconds,
            "kv_blocks_left": leaked,
            "requests_left": left,
            "memory_growth_bytes": growth,
            "memory_after": measured["memory_after"],
            "first_token_alone_ms": [value * 1e3 for value in measured["idle"]],
            "first_token_beside_long_ms": [value * 1e3 for value in measured["beside"]],
            "first_token_p99_ratio": beside / idle,
            "first_token_of_load_ms": {
                "p50": percentile(outcome.first_tokens, 0.5) * 1e3,
                "p99": percentile(outcome.first_tokens, 0.99) * 1e3,
            },
            "metrics_of_load": measured["metrics"],
            "exit_code": code,
            "verdicts": conclusions,
        },
    )
    parts = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
    panel = LinePanel(
        "first token of short requests",
        "ms",
        "percentile",
        [100 * part for part in parts],
        {
            "alone": [percentile(measured["idle"], part) * 1e3 for part in parts],
            "beside long prompts": [percentile(measured["beside"], part) * 1e3 for part in parts],
        },
        _GOAL_WAIT * idle * 1e3,
    )
    drawn = draw_lines([panel], out / "load.png", "windlass serve under load")
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)
    return not outcome.lost and not leaked and not left and code == 0
