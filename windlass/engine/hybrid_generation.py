"""Generation with the weights of a training engine, between its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from windlass.base.errors import ModelError
from windlass.base.module_modes import evaluating
from windlass.inference.engine_factory import make_rank_engine
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm import LLM
from windlass.inference.rank_channel import RankChannel, open_channel
from windlass.inference.transformers_generate import generate_by_engine
from windlass.zero.access.sharded_generate import unsharded_for_generation
from windlass.zero.sharded_model import ShardedModel

T = TypeVar("T")


class HybridGeneration:
    """Inference engine over the live module of a training engine: no weight is copied.

    At stages 0 to 2 the module computes with the parameters as they are. At stage 3 all parameters are unsharded once
    for a call and resharded afterwards. After a step, keys and values that were computed with the earlier weights are
    dropped. During a call the module is in eval mode.

    Args:
        sharded: function that returns the sharded model of the training engine, which `refresh` may replace.
        options: options of the inference engine.
        releases_cache: free the KV cache after each call.
    """

    def __init__(
        self, sharded: Callable[[], ShardedModel], options: EngineOptions, *, releases_cache: bool = False
    ) -> None:
        self._sharded, self._options, self._releases_cache = sharded, options, releases_cache
        self._llm: LLM | None = None
        self._ranks: RankChannel | None = None

    def generate(self, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, **settings: Any) -> Any:
        """Generate as transformers' `generate` does; see `generate_by_engine`. Collective at stage 3 and along tp.

        The module's own `generate` runs instead if the engine does not support a setting, or if the unsharded
        parameters do not fit in memory on some rank.
        """
        module: Any = self._sharded().model

        def generate(llm: LLM) -> torch.Tensor | None:
            return generate_by_engine(lambda: llm, module, input_ids, attention_mask, **dict(settings))

        answers = self.run(generate)
        if answers is not None:
            return answers
        with evaluating(module):
            return module.generate(input_ids, attention_mask=attention_mask, **settings)

    def run(self, function: Callable[[LLM], T]) -> T | None:
        """Return `function(engine)`; None if the unsharded parameters do not fit in memory on some rank.

        Raises:
            ModelError: the model is distributed along pp or ep.
        """
        sharded = self._sharded()
        if sharded.mesh.pp.size > 1:
            raise ModelError(
                f"parallel.pp distributes the layers over {sharded.mesh.pp.size} ranks, and generate needs all of them "
                "on each rank; save a checkpoint, run `windlass export`, and generate with windlass.LLM"
            )
        sharded.finish_update()
        with unsharded_for_generation(sharded) as fits:
            if not fits:
                return None
            with evaluating(sharded.model):
                try:
                    return function(self._find_llm(sharded))
                finally:
                    if self._releases_cache:
                        self.close()

    def close(self) -> None:
        """Free the KV cache and the inference engine. The next call builds a new engine."""
        if self._llm is not None:
            self._llm.close()
            self._llm, self._ranks = None, None

    def _find_llm(self, sharded: ShardedModel) -> LLM:
        if self._llm is None:
            axes = {name: sharded.mesh.axes[name] for name in ("tp", "ep")}
            tp, ep = axes["tp"].size, axes["ep"].size
            if ep > 1:
                raise ModelError("ranks along parallel.ep generate for different prompts; use engine.module.generate")
            if tp > 1:
                self._ranks = open_channel(tp=tp, ep=1, axes=axes)
                self._ranks.close_with_engine(keeps_axes=True)
            options = self._options.replace(tp=tp)
            self._llm = LLM.from_engine(
                make_rank_engine(sharded.model, options, skip_tokenizer=True, ranks=self._ranks)
            )
        return self._llm
