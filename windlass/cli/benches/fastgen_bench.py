"""Experiment of `windlass bench serve --workload fastgen`: three scheduling policies of one engine under FastGen's
service levels.

Clients in a closed loop send prompts and request answers of random lengths; see `service_level`. By default, the time
limits are scaled to the engine, so that a small model on a CPU can be measured: the first token may take 8 times as
long as without load, and gaps between tokens 4, 6 and 12 times as long, instead of 1/6, 1/4 and 1/2 second.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from windlass.base.errors import ModelError
from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.cli.benches.line_chart import LinePanel, draw_lines
from windlass.cli.benches.service_level import Level, LoadRequest, RequestTimes, draw_requests, percentile
from windlass.cli.benches.serving_models import make_random_llama
from windlass.inference.async_engine import AsyncLLMEngine
from windlass.inference.engine_factory import make_engine
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.outputs import RequestOutput
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.scheduler import POLICIES, Policy, ServiceLevel
from windlass.kernels.inference_path import get_inference_path

_RATES = (6, 4, 2)  # tokens per second of FastGen's three levels
_GAPS = {
    6: 4,
    4: 6,
    2: 12,
}  # for each rate, the longest gap between tokens at scaled levels, as a multiple of the gap without load
_FIRST_TOKEN = 8  # longest time to the first token at scaled levels, as a multiple of the time without load
_ORIGINAL_TOKENS = 512  # FastGen's level: the first token may take 1 second for this many prompt tokens
_SOLO_RUNS = 3


@dataclass(frozen=True)
class FastgenSettings:
    """Settings of the experiment.

    Attributes:
        model: directory; None: a random Llama of `hidden` and `layers`.
        clients: numbers of clients, ascending.
        requests: largest number of requests of a run; runs with few clients have fewer.
        prompt_mean, answer_mean: mean number of tokens.
        tokens_per_step: token budget of a step; at least the number of clients is used.
        seeds: runs with each number of clients; each run draws other lengths.
        in_thread: requests go through `AsyncLLMEngine`; False: the clients call the engine's steps.
        scaled: service levels scale with the rates of the model; False: FastGen's levels.
    """

    model: Path | None = None
    hidden: int = 512
    layers: int = 8
    clients: tuple[int, ...] = (1, 2, 4, 6, 8, 16, 32)
    requests: int = 128
    prompt_mean: int = 260
    answer_mean: int = 60
    tokens_per_step: int = 77
    seeds: int = 1
    in_thread: bool = True
    scaled: bool = True
    policies: tuple[Policy, ...] = POLICIES


@dataclass
class FastgenRun:
    """Requests of all seeds under one policy and number of clients."""

    policy: Policy
    clients: int
    seconds: float = 0.0
    times: list[RequestTimes] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return finished requests per second."""
        return len(self.times) / self.seconds if self.seconds else 0.0

    def share(self, level: Level) -> float:
        """Return the fraction of the requests that met a service level."""
        return sum(level.is_met_by(times) for times in self.times) / len(self.times) if self.times else 0.0

    def gaps(self) -> tuple[float, float]:
        """Return P50 and P95 of all gaps between tokens, in seconds."""
        found = [gap for times in self.times for gap in times.gaps]
        return percentile(found, 0.5), percentile(found, 0.95)


@dataclass
class FastgenResult:
    """All runs, and the service levels that requests are compared with.

    Attributes:
        levels: level for each of FastGen's rates, in tokens per second.
        prompt_rate, solo_gap: prefill tokens per second, and seconds between tokens, of a single request.
        unlimited: requests per second at the largest number of clients if requests declare no service level, by policy.
        different: number of requests whose tokens differ from those of the first run with the same seed.
    """

    levels: dict[int, Level]
    prompt_rate: float
    solo_gap: float
    runs: list[FastgenRun]
    unlimited: dict[str, float]
    different: int

    def of(self, policy: str) -> list[FastgenRun]:
        """Return the runs of a policy, by rising number of clients."""
        return sorted((run for run in self.runs if run.policy == policy), key=lambda run: run.clients)

    def peak(self, policy: str, rate: int) -> tuple[float, FastgenRun]:
        """Return the largest effective throughput (requests per second) over all numbers of clients, and its run."""
        level = self.levels[rate]
        return max(((run.rate * run.share(level), run) for run in self.of(policy)), key=lambda found: found[0])


def run_fastgen_bench(settings: FastgenSettings, out: Path) -> bool:
    """Run the experiment; print the table, write the JSON file and the picture.

    Returns:
        True if every request got the same tokens under all policies and numbers of clients.
    """
    console = bench_console()
    with tempfile.TemporaryDirectory() as folder:
        model = settings.model or make_random_llama(Path(folder), settings.hidden, settings.layers)
        most = max(settings.clients)
        options = EngineOptions(
            max_tokens_per_step=max(settings.tokens_per_step, most),
            max_sequences=most,
            kv_cache_tokens=most * (4 * settings.prompt_mean + 3 * settings.answer_mean),
            prefix_caching=False,
        )
        engine = make_engine(model, options, skip_tokenizer=True)
    parameters = sum(parameter.numel() for parameter in engine.runner.model.parameters())
    console.print(
        f"{parameters / 1e6:.1f}M parameters; kernels {get_inference_path().name}, {torch.get_num_threads()} threads; "
        f"prompts of {settings.prompt_mean} tokens, answers of {settings.answer_mean}, steps of "
        f"{settings.tokens_per_step}; {'AsyncLLMEngine' if settings.in_thread else 'LLMEngine'}",
        soft_wrap=True,
    )
    driver: _Driver = _ThreadDriver(engine) if settings.in_thread else _StepDriver(engine)
    try:
        result = _measure(settings, engine, driver)
    finally:
        driver.close()
    _report(settings, result, parameters, out)
    return result.different == 0


def _measure(settings: FastgenSettings, engine: LLMEngine, driver: _Driver) -> FastgenResult:
    rounds = [(seed, clients) for seed in range(settings.seeds) for clients in settings.clients]
    runs = {
        (policy, clients): FastgenRun(policy, clients) for policy in settings.policies for clients in settings.clients
    }
    unlimited: dict[str, float] = {}
    answers: dict[tuple[int, int], list[int]] = {}
    different = 0
    vocabulary = engine.runner.vocab_size
    with Progress(console=bench_console(), transient=True) as progress:
        task = progress.add_task("lone requests", total=len(settings.policies) * (len(rounds) + 1))
        prompt_rate, solo_gap = _solo_rates(settings, engine, driver)
        levels = _levels(settings, prompt_rate, solo_gap)
        tightest = levels[_RATES[0]]
        # every second load runs the policies in reverse order, so that slow drift of the machine affects all equally
        for number, (seed, clients) in enumerate([*rounds, (0, max(settings.clients))]):
            is_unlimited = number == len(rounds)
            count = min(settings.requests, max(24, 16 * clients))
            load = draw_requests(count, settings.prompt_mean, settings.answer_mean, vocabulary, seed)
            for policy in settings.policies[:: -1 if number % 2 else 1]:
                named = f"{policy}, {clients} clients{', no level' if is_unlimited else ''}"
                progress.update(task, description=named)
                engine.set_policy(policy)
                began = time.perf_counter()
                found = driver.run(load, clients, None if is_unlimited else tightest)
                seconds = time.perf_counter() - began
                for place, times in enumerate(found):
                    different += answers.setdefault((seed, place), times.tokens) != times.tokens
                if is_unlimited:
                    unlimited[policy] = len(load) / seconds
                else:
                    runs[policy, clients].seconds += seconds
                    runs[policy, clients].times += found
                progress.advance(task)
    return FastgenResult(levels, prompt_rate, solo_gap, list(runs.values()), unlimited, different)


def _solo_rates(settings: FastgenSettings, engine: LLMEngine, driver: _Driver) -> tuple[float, float]:
    """Return the rates without load: prefill tokens per second, and seconds between tokens of a single request."""
    engine.set_policy("orca")
    load = draw_requests(_SOLO_RUNS + 1, settings.prompt_mean, 24, engine.runner.vocab_size, -1)
    found = driver.run(load, 1, None)[1:]  # the first one warms up
    rates = [times.prompt / times.first_token for times in found]
    # several tokens of a fast model may come at once, so each request counts with its mean gap
    gaps = [sum(times.gaps) / max(len(times.gaps), 1) for times in found]
    return statistics.median(rates), max(statistics.median(gaps), 1e-9)


def _levels(settings: FastgenSettings, prompt_rate: float, solo_gap: float) -> dict[int, Level]:
    if not settings.scaled:
        return {rate: Level(1 / _ORIGINAL_TOKENS, 1 / rate) for rate in _RATES}
    return {rate: Level(_FIRST_TOKEN / prompt_rate, _GAPS[rate] * solo_gap) for rate in _RATES}


class _Driver:
    """Clients in a closed loop: each client sends its next request when its last request is done."""

    def run(self, load: Sequence[LoadRequest], clients: int, level: Level | None) -> list[RequestTimes]:
        """Serve the requests and return their times, in the order of the load."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the engine."""
        raise NotImplementedError


class _StepDriver(_Driver):
    """Clients that call the engine's steps in this thread."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def run(self, load: Sequence[LoadRequest], clients: int, level: Level | None) -> list[RequestTimes]:
        engine, found = self._engine, [RequestTimes(len(request.prompt), 0.0) for request in load]
        while engine.use_idle_time():  # `AsyncLLMEngine` does this whenever it is idle
            pass
        running, sent = 0, 0
        while sent < len(load) or running:
            while running < clients and sent < len(load):
                found[sent].sent = time.perf_counter()
                level_of = _declare(level, load[sent])
                engine.add_request(str(sent), load[sent].prompt, _forced(load[sent]), level=level_of, streams=True)
                running, sent = running + 1, sent + 1
            for output in engine.step():
                _note(found[int(output.request_id)], output)
                running -= output.finished
        return found

    def close(self) -> None:
        self._engine.close()


class _ThreadDriver(_Driver):
    """Clients that are tasks of an event loop, on an engine in its own thread."""

    def __init__(self, engine: LLMEngine) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = AsyncLLMEngine(engine)
        self._loop.run_until_complete(self._engine.start())

    def run(self, load: Sequence[LoadRequest], clients: int, level: Level | None) -> list[RequestTimes]:
        found = [RequestTimes(len(request.prompt), 0.0) for request in load]
        places = iter(range(len(load)))

        async def run() -> None:
            await asyncio.gather(*(self._client(load, found, places, level) for _ in range(clients)))

        self._loop.run_until_complete(run())
        return found

    async def _client(
        self, load: Sequence[LoadRequest], found: list[RequestTimes], places: Iterator[int], level: Level | None
    ) -> None:
        for place in places:
            request, times = load[place], found[place]
            times.sent = time.perf_counter()
            async for output in self._engine.stream(request.prompt, _forced(request), sla=_declare(level, request)):
                _note(times, output)

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.shutdown())
        self._loop.close()


def _forced(request: LoadRequest) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request.answer, ignore_eos=True, detokenize=False)


def _declare(level: Level | None, request: LoadRequest) -> ServiceLevel | None:
    if level is None:
        return None
    return ServiceLevel(level.token_seconds * len(request.prompt), 1 / level.gap_seconds)


def _note(times: RequestTimes, output: RequestOutput) -> None:
    """Add the arrival of the new tokens to the times of a request.

    Raises:
        ModelError: the request ended by an error, so its times mean nothing.
    """
    if output.error is not None:
        raise ModelError(f"request {output.request_id} of the load failed: {output.error}")
    tokens = output.outputs[0].token_ids
    times.arrivals += [time.perf_counter()] * (len(tokens) - len(times.tokens))
    times.tokens = list(tokens)


# report


def _report(settings: FastgenSettings, result: FastgenResult, parameters: int, out: Path) -> None:
    console = bench_console()
    first = result.levels[_RATES[0]]
    console.print(
        f"a lone prompt: {result.prompt_rate:.0f} tokens/s; a lone request: {result.solo_gap * 1e3:.2f} ms per token; "
        f"first token within {first.token_seconds * 1e3:.2f} ms per token of the prompt; gaps within "
        + ", ".join(f"{level.gap_seconds * 1e3:.1f} ms (R{rate})" for rate, level in result.levels.items()),
        soft_wrap=True,
    )
    console.print(_table(settings, result))
    conclusions = _conclusions(settings, result)
    for line in conclusions:
        console.print(line, soft_wrap=True)
    stored = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    written = write_result(
        out / "fastgen.json",
        {
            "bench": "serve fastgen",
            "kernels": get_inference_path().name,
            "parameters": parameters,
            "settings": stored,
            "prompt_tokens_per_second": result.prompt_rate,
            "solo_gap_ms": result.solo_gap * 1e3,
            "levels": {f"R{rate}": asdict(level) for rate, level in result.levels.items()},
            "runs": [_row(run, result) for policy in settings.policies for run in result.of(policy)],
            "requests_per_second_without_level": result.unlimited,
            "peaks": {
                policy: {f"R{rate}": result.peak(policy, rate)[0] for rate in _RATES} for policy in settings.policies
            },
            "verdicts": conclusions,
        },
    )
    panels = [
        LinePanel(
            f"within R{rate} (gaps below {level.gap_seconds * 1e3:.0f} ms)",
            "requests / s that met the level",
            "clients",
            settings.clients,
            {policy: [run.rate * run.share(level) for run in result.of(policy)] for policy in settings.policies},
        )
        for rate, level in result.levels.items()
    ]
    gaps: dict[str, list[float]] = {
        policy: [run.gaps()[1] * 1e3 for run in result.of(policy)] for policy in settings.policies
    }
    panels.append(LinePanel("P95 of gaps", "ms", "clients", settings.clients, gaps, first.gap_seconds * 1e3))
    title = f"FastGen's effective throughput, {parameters / 1e6:.0f}M parameters"
    drawn = draw_lines(panels, out / "fastgen.png", title)
    console.print(f"written: {written}{' and its .png' if drawn else ''}", soft_wrap=True)


def _row(run: FastgenRun, result: FastgenResult) -> dict[str, Any]:
    median, high = run.gaps()
    first = [times.first_token for times in run.times]
    return {
        "policy": run.policy,
        "clients": run.clients,
        "requests": len(run.times),
        "requests_per_second": run.rate,
        "share": {f"R{rate}": run.share(level) for rate, level in result.levels.items()},
        "gap_p50_ms": median * 1e3,
        "gap_p95_ms": high * 1e3,
        "first_token_p50_ms": percentile(first, 0.5) * 1e3,
        "first_token_p95_ms": percentile(first, 0.95) * 1e3,
    }


def _table(settings: FastgenSettings, result: FastgenResult) -> Table:
    table = Table()
    columns = ("policy", "clients", "requests/s", *(f"in R{rate}" for rate in _RATES), "effective R6", "gap P50 ms")
    for column in (*columns, "P95 ms", "P95 / P50"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in settings.policies:
        for run in result.of(policy):
            median, high = run.gaps()
            table.add_row(
                policy,
                str(run.clients),
                f"{run.rate:.2f}",
                *(f"{run.share(level):.1%}" for level in result.levels.values()),
                f"{run.rate * run.share(result.levels[_RATES[0]]):.2f}",
                f"{median * 1e3:.1f}",
                f"{high * 1e3:.1f}",
                f"{high / median:.2f}" if median else "",
            )
        table.add_section()
    return table


def _conclusions(settings: FastgenSettings, result: FastgenResult) -> list[str]:
    found = []
    ours = settings.policies[0]
    goals = {("prefill-first", 6): 2.0, ("orca", 6): 1.5}
    for rate in _RATES:
        best, run = result.peak(ours, rate)
        share = run.share(result.levels[rate])
        line = f"R{rate}: {ours} {best:.2f} requests/s at {run.clients} clients, {share:.1%} in time (goal 99 %)"
        for other in settings.policies[1:]:
            peak = result.peak(other, rate)[0]
            ratio = best / peak if peak else float("inf")
            goal = f" (goal {goals[other, rate]:.1f})" if (other, rate) in goals else ""
            line += f"; {ratio:.2f} x {other}{goal}"
        found.append(line)
    for run in result.of(ours):
        if run.clients == 16:
            median, high = run.gaps()
            found.append(f"{ours}, 16 clients: P95 / P50 of gaps {high / max(median, 1e-9):.2f} (goal 1.5)")
    if result.unlimited:
        best = max(result.unlimited.values())
        rates = ", ".join(f"{policy} {rate:.2f}" for policy, rate in result.unlimited.items())
        part = result.unlimited[ours] / best
        found.append(f"requests/s without a level: {rates}; {ours} has {part:.0%} of the best (goal 95 %)")
    equal = "equal under all policies" if not result.different else f"DIFFERENT in {result.different} requests"
    found.append(f"tokens: {equal}")
    return found
