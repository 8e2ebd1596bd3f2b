"""Drafts of a smaller model, for speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.model_loading import find_max_length
from windlass.inference.runner_factory import make_runner
from windlass.inference.sampling_params import SamplingParams


class DraftModelProposer:
    """Proposes the likeliest tokens of a smaller model.

    The draft model has an engine of its own, whose prefix cache holds what it computed of each sequence: a step of the
    large model costs the draft model the accepted tokens and one forward for each draft.
    """

    def __init__(self, model: nn.Module, options: EngineOptions) -> None:
        draft_options = options.replace(
            speculative=None, lora=None, swap_bytes=0, swap_directory=None, max_gap_ms=None, prefix_caching=True
        )
        window = find_max_length(model)
        runner = make_runner(model.eval(), draft_options, window)
        self._length = min(window, runner.num_blocks * runner.block_size)
        self._engine = LLMEngine(runner, draft_options, max_model_len=self._length)
        self.vocab_size = runner.vocab_size

    def propose(self, sequences: Sequence[tuple[int, list[int]]], count: int) -> list[list[int]]:
        """Return at most `count` drafts for each sequence, given its id and its tokens."""
        found: dict[str, list[int]] = {}
        for sequence_id, tokens in sequences:
            room = min(count, self._length - len(tokens))
            if room > 0:
                params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True, detokenize=False)
                self._engine.add_request(str(sequence_id), tokens, params)
        while self._engine.has_requests():
            for output in self._engine.step():
                found[output.request_id] = output.outputs[0].token_ids
        return [found.get(str(sequence_id), []) for sequence_id, _ in sequences]

    def release(self, sequence_id: int) -> None:
        """Do nothing: blocks of finished sequences leave the prefix cache when others need them."""
