"""State of requests and of their sequences inside an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from windlass.base.errors import EngineOverloadedError, ModelError, RequestError
from windlass.inference.block_manager import BlockKey, hash_block
from windlass.inference.detokenizer import Detokenizer
from windlass.inference.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from windlass.inference.sampler import SequenceSampler
from windlass.inference.sampling_params import SamplingParams
from windlass.inference.scheduler import SequenceSnapshot, ServiceLevel
from windlass.inference.step_batch import SavedBlocks
from windlass.inference.structured_output import OutputConstraint


@dataclass(eq=False)
class GenerationSequence:
    """Answer that is being generated.

    Attributes:
        token_ids: prompt and answer, without drafts.
        generated: the answer's tokens.
        num_computed: number of leading tokens with keys and values in the cache.
        blocks: KV blocks in order.
        block_keys: hashes of the full blocks, as far as they were needed.
        num_registered: number of leading blocks that came from the prefix cache or were added to it.
        drafts: proposed tokens after the last token.
        saved: content of the sequence's blocks while the sequence is preempted, empty if it is in a file; else None.
        in_flight: number of steps with the sequence that were started and are not finished.
        last_step: number of steps that were finished when the sequence's latest step started.
        fair_start: as in `SequenceSnapshot`.
    """

    sequence_id: int
    request: GenerationRequest
    index: int
    token_ids: list[int]
    output: CompletionOutput
    sampler: SequenceSampler
    detokenizer: Detokenizer | None = None
    constraint: OutputConstraint | None = None
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)
    num_registered: int = 0
    drafts: list[int] = field(default_factory=list)
    saved: SavedBlocks | None = None
    has_sampled: bool = False
    in_flight: int = 0
    last_step: int = 0
    fair_start: float = 0.0

    @property
    def generated(self) -> list[int]:
        return self.output.token_ids

    @property
    def num_known(self) -> int:
        return len(self.token_ids) + len(self.drafts)

    @property
    def is_prompt(self) -> bool:
        """True until the answer has a token, and while a preempted sequence recomputes tokens before its last one."""
        return not self.has_sampled or len(self.token_ids) - self.num_computed > 1

    def keys_until(self, num_blocks: int, block_size: int) -> list[BlockKey]:
        """Return the keys of the first `num_blocks` blocks, which must be full of tokens of `token_ids`."""
        keys = self.block_keys
        while len(keys) < num_blocks:
            start = len(keys) * block_size
            parent = keys[-1] if keys else self.request.cache_salt
            keys.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return keys[:num_blocks]

    def snapshot(
        self, *, num_computed: int, num_blocks: int, num_freed: int, copies_block: bool, now_candidates: int
    ) -> SequenceSnapshot:
        """Return the state of the sequence for the scheduler."""
        request = self.request
        return SequenceSnapshot(
            self.sequence_id,
            request.metrics.arrival_time,
            self.num_known,
            num_computed,
            num_blocks,
            num_freed,
            len(self.drafts),
            copies_block,
            request.priority,
            request.level,
            now_candidates,
            self.has_sampled,
            self.fair_start,
        )


@dataclass(eq=False)
class GenerationRequest:
    """Request and its answers.

    Attributes:
        cache_salt: bytes that identify everything besides tokens on which keys and values depend; see
            `AdapterStore.cache_salt`.
        sequences: only the first one until the prompt is computed; then all candidates.
        streams: report the request at every token, not only at its end.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    metrics: RequestMetrics
    priority: int = 0
    level: ServiceLevel | None = None
    lora_name: str | None = None
    streams: bool = False
    cache_salt: bytes = b""
    sequences: list[GenerationSequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: RequestError | ModelError | None = None

    @property
    def finished(self) -> bool:
        return None not in [sequence.output.finish_reason for sequence in self.sequences]

    def to_output(self) -> RequestOutput:
        """Return the current state with copies of all answers; after their end, only of the best `n` (`best_of`)."""
        finished = self.finished
        outputs = [_copy_output(sequence.output) for sequence in self.sequences]
        if finished and len(outputs) > self.params.n:
            outputs = _best(outputs, self.params.n)
        if self.params.best_of is not None and self.params.logprobs is None:
            for output in outputs:
                output.logprobs, output.cumulative_logprob, output.text_offsets = None, None, None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            self.prompt_logprobs,
            outputs,
            finished,
            self.metrics,
            self.lora_name,
            None if self.error is None else str(self.error),
            isinstance(self.error, RequestError),
            self.error.retry_after if isinstance(self.error, EngineOverloadedError) else None,
        )


def _copy_output(output: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(
        output.index,
        output.text,
        list(output.token_ids),
        output.cumulative_logprob,
        None if output.logprobs is None else list(output.logprobs),
        output.finish_reason,
        output.stop_reason,
        None if output.text_offsets is None else list(output.text_offsets),
    )


def _best(outputs: Sequence[CompletionOutput], count: int) -> list[CompletionOutput]:
    """Return the `count` outputs with the highest mean log-probability of a token, sorted, and renumber them from 0."""
    ranked = sorted(outputs, key=lambda o: -(o.cumulative_logprob or 0.0) / max(len(o.token_ids), 1))[:count]
    for index, output in enumerate(ranked):
        output.index = index
    return ranked
