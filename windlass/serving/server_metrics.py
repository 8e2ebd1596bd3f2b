"""Prometheus metrics, with vLLM's names where the meaning is the same, so that vLLM's dashboards work.

Names without a counterpart begin with `windlass:`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from windlass.inference.outputs import RequestMetrics, RequestOutput
from windlass.serving.served_engine import ServedEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
_REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_TOKEN_COUNTS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
    200_000,
)

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time to first token in seconds.", _FIRST_TOKEN_SECONDS),
    ("inter_token_latency_seconds", "Time between two tokens of an answer in seconds.", _TOKEN_SECONDS),
    ("e2e_request_latency_seconds", "Time of a request from its arrival to its end in seconds.", _REQUEST_SECONDS),
    ("request_queue_time_seconds", "Time before the first step of a request in seconds.", _REQUEST_SECONDS),
    ("request_prefill_time_seconds", "Time from the first step to the first token in seconds.", _REQUEST_SECONDS),
    ("request_decode_time_seconds", "Time from the first token to the last in seconds.", _REQUEST_SECONDS),
    ("request_prompt_tokens", "Tokens of a prompt.", _TOKEN_COUNTS),
    ("request_generation_tokens", "Generated tokens of a request.", _TOKEN_COUNTS),
)


class HttpMetrics:
    """Count of HTTP requests by path and status.

    Args:
        engine: label that distinguishes the processes of one server.
    """

    def __init__(self, registry: CollectorRegistry, engine: str) -> None:
        self._engine = engine
        self._requests = Counter(
            "windlass:http_requests", "Requests by path and status.", ("path", "status", "engine"), registry=registry
        )

    def count(self, path: str, status: int) -> None:
        """Count one answer."""
        self._requests.labels(path, str(status), self._engine).inc()


class ServerMetrics:
    """Metrics of one server and its engine."""

    def __init__(self, model_name: str, engine_index: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, str(engine_index))
        self.http = HttpMetrics(self.registry, str(engine_index))
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry).labels(
                *self._labels
            )
            for name, text, buckets in _HISTOGRAMS
        }
        rejections = Counter(
            "vllm:admission_rejections", "Requests refused: a full or slow queue.", _LABELS, registry=self.registry
        )
        self.rejections = rejections.labels(*self._labels)

    def watch(self, engine: ServedEngine) -> None:
        """Add the counters and gauges of an engine."""
        self.registry.register(_EngineCollector(engine, self._labels))

    def observe_token_gap(self, seconds: float, tokens: int) -> None:
        """Add the time that `tokens` tokens of one answer took together, after its first token."""
        for _ in range(tokens):
            self._histograms["inter_token_latency_seconds"].observe(seconds / tokens)

    def observe_first_token(self, times: RequestMetrics) -> None:
        """Add the time to the first token of a request, which may be cancelled later."""
        if times.first_token_time is not None:
            seconds = max(0.0, times.first_token_time - times.arrival_time)
            self._histograms["time_to_first_token_seconds"].observe(seconds)

    def observe_finished(self, output: RequestOutput) -> None:
        """Add the times and counts of a request that has ended."""
        times = output.metrics
        first, scheduled, last = times.first_token_time, times.scheduled_time, times.last_token_time
        spans = {
            "e2e_request_latency_seconds": (times.arrival_time, times.finished_time),
            "request_queue_time_seconds": (times.arrival_time, scheduled),
            "request_prefill_time_seconds": (scheduled, first),
            "request_decode_time_seconds": (first, last),
        }
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                self._histograms[name].observe(max(0.0, end - start))
        self._histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        self._histograms["request_generation_tokens"].observe(sum(len(one.token_ids) for one in output.outputs))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Collector that reads the engine's counters at each scrape, so that a step costs nothing."""

    def __init__(self, engine: ServedEngine, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that a registration does not call `collect` to find the names of the metrics."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield gauges, counters, and the histogram of tokens in a step."""
        stats = self._engine.stats()
        gauges = (
            ("vllm:num_requests_running", "Requests in the current step.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", stats.kv_cache_usage),
            ("windlass:kv_blocks", "KV blocks of the cache.", stats.kv_blocks),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        counters = (
            (
                "vllm:prefix_cache_queries",
                "Tokens of prompts looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            ("vllm:prefix_cache_hits", "Tokens of prompts found in the prefix cache.", stats.prefix_cache_hits),
            ("vllm:num_preemptions", "Times that the KV blocks of a request were freed.", stats.num_preemptions),
            ("vllm:prompt_tokens", "Tokens of prompts that were computed or found.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens.", stats.generation_tokens),
            ("vllm:spec_decode_num_draft_tokens", "Proposed draft tokens.", stats.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.accepted_draft_tokens),
            ("windlass:step_seconds", "Time in steps of the engine.", stats.step_seconds),
            ("windlass:forward_seconds", "Time in forwards of the model, a part of the steps.", stats.forward_seconds),
            ("windlass:idle_seconds", "Time without any request.", stats.idle_seconds),
        )
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that have ended, by reason.", labels=(*_LABELS, "finished_reason")
        )
        for reason in sorted({"stop", "length", "abort", *stats.finished}):
            finished.add_metric((*self._labels, reason), stats.finished.get(reason, 0))
        yield finished
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=_LABELS)
        steps.add_metric(self._labels, [("+Inf", stats.steps)], stats.step_tokens)
        yield steps
