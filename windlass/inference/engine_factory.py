"""Assembly of an engine from a model, its tokenizer and options."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.base.compute_device import local_device
from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.base.malloc_thresholds import loading_without_gaps
from windlass.base.module_modes import evaluating
from windlass.inference.engine_options import EngineOptions
from windlass.inference.llm_engine import LLMEngine
from windlass.inference.lora import LoraAdapters
from windlass.inference.model_forward import find_device, own_modes
from windlass.inference.model_loading import (
    DEFAULT_LENGTH,
    find_eos_ids,
    find_max_length,
    find_scaled_length,
    load_config,
    load_model,
    load_tokenizer_of,
)
from windlass.inference.own_cache_runner import OwnCacheModelRunner
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.parallel_model import is_sharded
from windlass.inference.rank_channel import RankChannel, open_channel
from windlass.inference.rank_worker import RankWorker
from windlass.inference.runner_factory import make_runner, measure_step_cost
from windlass.inference.sharded_runner import ShardedRunner
from windlass.inference.speculation import DraftProposer, NgramProposer
from windlass.inference.step_batch import ModelRunner
from windlass.inference.step_cost import StepCost
from windlass.inference.streamed_loading import load_streamed_model
from windlass.inference.streamed_modules import StreamedModules

# `fit_batch` multiplies the measured number of sequences by this, because measured times vary
_BATCH_MARGIN = 1.25
_LEAST_BATCH = 16  # `fit_batch` never lowers `max_sequences` below this


def make_engine(
    model: str | Path | nn.Module,
    options: EngineOptions,
    *,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    skip_tokenizer: bool = False,
) -> LLMEngine:
    """Build an engine on the only rank of a model, or on its leader; see `make_rank_engine`.

    Raises:
        ModelError: see `make_rank_engine`.
        ConfigError: see `make_rank_engine`; or this rank is not the leader.
    """
    made = make_rank_engine(
        model,
        options,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        skip_tokenizer=skip_tokenizer,
    )
    if isinstance(made, LLMEngine):
        return made
    raise ConfigError(
        f"this rank holds a part of the model (tp = {options.tp}, ep = {options.ep}, pp = {options.pp}), and the first "
        "rank of the model has the engine; call windlass.inference.worker_loop.run_worker(...) with the same arguments "
        "on all others"
    )


def make_rank_engine(
    model: str | Path | nn.Module,
    options: EngineOptions,
    *,
    tokenizer: Any = None,
    device: torch.device | str | None = None,
    dtype: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    skip_tokenizer: bool = False,
    ranks: RankChannel | None = None,
    owned: bool | None = None,
) -> LLMEngine | RankWorker:
    """Build the engine of a model on its first rank, and a `RankWorker` on each other rank. Collective over the ranks
    of the model.

    Args:
        model: directory, GGUF file or name on the hub, from which the model is loaded; or a module, which is served in
            place, and sharded if there are several ranks.
        tokenizer: tokenizer of transformers, or its directory; None: that of the model's directory, none for a module.
        device: device of a model that is loaded; None: this rank's device.
        skip_tokenizer: leave out the tokenizer of the model's directory; prompts are token ids then.
        ranks: ranks of a module that is sharded already; None: the ranks that `options` request.
        owned: True if the engine is the only user of the weights, so that they may be packed; None: True for a
            directory, False for a module.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded or served.
        ConfigError: options contradict each other or the model, or the number of ranks is not a multiple of
            `options.num_ranks`.
        StorageError: the weight file or `swap_directory` cannot be used.
    """
    if ranks is None and options.num_ranks > 1:
        shards_module = isinstance(model, nn.Module) and not is_sharded(model)
        ranks = open_channel(tp=options.tp, ep=options.ep, pp=options.pp)
        ranks.close_with_engine(keeps_axes=shards_module)
    # A module of the caller may be in training mode: `evaluating` restores the mode of each layer after the build.
    loading = evaluating(model) if isinstance(model, nn.Module) else loading_without_gaps()
    with nullcontext() if ranks is None else ranks.guard(), own_modes(allocates=True), loading:
        return _build(model, options, tokenizer, device, dtype, trust_remote_code, skip_tokenizer, ranks, owned)


def _build(
    model: str | Path | nn.Module,
    options: EngineOptions,
    tokenizer: Any,
    device: torch.device | str | None,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    skip_tokenizer: bool,
    ranks: RankChannel | None,
    owned: bool | None,
) -> LLMEngine | RankWorker:
    owns = not isinstance(model, nn.Module) if owned is None else owned
    # configuration and tokenizer come first: an error in them must not wait for the weights, which may take minutes
    if not isinstance(model, nn.Module):
        load_config(model, trust_remote_code=trust_remote_code)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer_of(tokenizer, trust_remote_code=trust_remote_code)
    elif tokenizer is None and not skip_tokenizer and not isinstance(model, nn.Module):
        tokenizer = load_tokenizer_of(model, trust_remote_code=trust_remote_code)
    streamed = None
    if isinstance(model, nn.Module):
        module = model
    elif options.streams_weights:
        module, streamed = load_streamed_model(
            model, options, dtype=dtype, device=device or local_device(), trust_remote_code=trust_remote_code
        )
    else:
        module = load_model(
            model,
            dtype=dtype,
            device=device or local_device(),
            trust_remote_code=trust_remote_code,
            pipeline=None if ranks is None else ranks.pipeline,
        )
    window = find_max_length(module)
    if window is None:
        window = options.max_model_len or DEFAULT_LENGTH
    limit = max(window, find_scaled_length(module) or 0)
    if options.max_model_len is not None and options.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, and the model attends to {limit} tokens; write at most that"
        )
    longest = options.max_model_len or window
    runner = make_runner(module, options, window, owned=owns, ranks=ranks, streamed=streamed)
    load_draft = partial(load_model, dtype=dtype, device=find_device(module), trust_remote_code=trust_remote_code)
    try:
        return _assemble(module, runner, options, tokenizer, longest, ranks, streamed, load_draft)
    except BaseException:
        runner.close()  # also restores the attention function of the caller's module
        raise


def _assemble(
    module: nn.Module,
    runner: ModelRunner,
    options: EngineOptions,
    tokenizer: Any,
    longest: int,
    ranks: RankChannel | None,
    streamed: StreamedModules | None,
    load_draft: Callable[[str | Path], nn.Module],
) -> LLMEngine | RankWorker:
    """Build the engine of a runner, or this rank's worker, for sequences of up to `longest` tokens.

    Raises:
        ConfigError: the KV cache holds fewer tokens than `max_model_len`.
    """
    if ranks is None or ranks.pipeline is None:
        assert isinstance(runner, (PagedModelRunner, OwnCacheModelRunner))
        runner.lora = _load_adapters(module, options)
    capacity = runner.num_blocks * runner.block_size
    if capacity < longest:
        if options.max_model_len is not None:
            raise ConfigError(
                f"the KV cache holds {capacity} tokens, fewer than max_model_len ({longest}); raise kv_cache_tokens or "
                "lower max_model_len"
            )
        logger.info("the KV cache holds %d tokens: prompt and answer have at most that many, not %d", capacity, longest)
        longest = capacity
    cost = None
    if options.measures_steps:
        tokens = options.max_tokens_per_step
        cost = measure_step_cost(
            runner, find_device(module), tokens, longest, is_sharded=ranks is not None, streamed=streamed
        )
        if streamed is not None:
            options = _fit_batch(cost, options, streamed)
    if ranks is not None:
        if not ranks.is_leader:
            return RankWorker(runner, ranks, options, tokenizer=tokenizer, max_model_len=longest)
        runner = ShardedRunner(runner, ranks)
    logger.info("%s: %s", type(module).__name__, runner.description)
    proposer = _make_proposer(options, runner, load_draft)
    try:
        return LLMEngine(
            runner,
            options,
            tokenizer=tokenizer,
            eos_ids=find_eos_ids(module, tokenizer),
            max_model_len=longest,
            cost=cost,
            proposer=proposer,
        )
    except BaseException:
        if proposer is not None:
            proposer.close()
        raise


def _fit_batch(cost: StepCost, options: EngineOptions, streamed: StreamedModules) -> EngineOptions:
    """Log how many tokens a step computes while it reads the weights. With `fit_batch`, return options with
    `max_sequences` lowered to about this number; else return `options`."""
    hidden = max(1, int(cost.weight_seconds / cost.token_seconds))
    logger.info(
        "a step reads %.2f GB of weights in %.2f s, and computes %d tokens in that time",
        streamed.index.streamed_bytes / 1e9,
        cost.weight_seconds,
        hidden,
    )
    if options.max_gap_ms is not None and options.max_gap_ms < cost.weight_seconds * 1e3:
        logger.warning(
            "max_gap_ms is %g, and a step reads weights for %.0f ms: while answers run, prompts get no time until "
            "max_wait_seconds; raise max_gap_ms to %.0f",
            options.max_gap_ms,
            cost.weight_seconds * 1e3,
            cost.weight_seconds * 2e3,
        )
    if hidden > options.max_tokens_per_step:
        logger.info("max_tokens_per_step is %d; steps of up to %d take no longer", options.max_tokens_per_step, hidden)
    fitting = max(math.ceil(hidden * _BATCH_MARGIN), _LEAST_BATCH)
    if options.fit_batch and fitting < options.max_sequences:
        logger.info("at most %d sequences run at the same time: more compute longer than weights are read", fitting)
        return replace(options, max_sequences=fitting)
    return options


def _load_adapters(module: nn.Module, options: EngineOptions) -> LoraAdapters:
    adapters = LoraAdapters(module)
    for name, directory in (options.lora or {}).items():
        adapters.add(name, directory)
    return adapters


def _make_proposer(
    options: EngineOptions, runner: ModelRunner, load_draft: Callable[[str | Path], nn.Module]
) -> DraftProposer | None:
    speculative = options.speculative
    if speculative is None:
        return None
    if not runner.computes_drafts:
        logger.warning(
            "speculative has no effect: a model on its own cache computes one token at a time, so it runs without "
            "drafts; leave speculative out"
        )
        return None
    if speculative.method == "ngram":
        return NgramProposer(speculative)
    from windlass.inference.draft_model import DraftModelProposer

    draft = speculative.model
    module = draft if isinstance(draft, nn.Module) else load_draft(draft)
    proposer = DraftModelProposer(module, options, owned=module is not draft)
    if proposer.vocab_size != runner.vocab_size:
        proposer.close()
        raise ModelError(
            f"the draft model has a vocabulary of {proposer.vocab_size} tokens and the model one of "
            f"{runner.vocab_size}; use a draft model of the same tokenizer"
        )
    return proposer
