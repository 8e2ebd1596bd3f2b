"""Choice of the runner of a model, and the check of its first tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.inference.engine_options import EngineOptions
from windlass.inference.model_forward import CausalForward
from windlass.inference.own_cache_runner import OwnCacheModelRunner
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.step_batch import ModelRunner, StepBatch
from windlass.inference.step_cost import StepCost
from windlass.storage.staging_memory import available_memory

_CHECKED_TOKENS = 8
_CHECKED_PROMPTS = (11, 5)  # tokens of each
_OWN_CACHE_TOKENS = 1 << 16
_CACHE_SHARE = 0.4  # of the free host memory


def make_runner(model: nn.Module, options: EngineOptions, max_model_len: int) -> ModelRunner:
    """Return the fastest runner that computes what the model computes.

    Raises:
        ModelError: the model is an encoder-decoder, or the KV cache would be too small for one sequence.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder; windlass serves causal language models, which have a "
            "decoder alone"
        )
    longest = options.max_model_len or max_model_len
    try:
        runner: ModelRunner = PagedModelRunner(
            model,
            block_size=options.block_size,
            num_blocks=_block_counter(options, longest, model),
            kv_dtype=options.kv_torch_dtype,
        )
    except ConfigError:
        raise
    except Exception as error:  # code of any model runs here; its own cache is tried next
        reason = str(error).split("\n")[0]
    else:
        problem = check_first_tokens(model, runner, longest) if options.check_at_load else None
        if problem is None:
            return runner
        runner.close()
        reason = problem
    tokens = options.kv_cache_tokens or max(_OWN_CACHE_TOKENS, longest)
    own = OwnCacheModelRunner(model, block_size=options.block_size, num_blocks=-(-tokens // options.block_size))
    logger.warning(
        "%s runs with %s, because a paged KV cache cannot be used: %s", type(model).__name__, own.description, reason
    )
    return own


def check_first_tokens(model: nn.Module, runner: ModelRunner, max_length: int) -> str | None:
    """Generate greedy tokens of two prompts together and compare their logits with the plain model's.

    Returns:
        The difference, if it is larger than rounding explains; else None. The KV cache is written, so call it before
        other sequences exist.
    """
    size = runner.block_size
    needed = -(-(max(_CHECKED_PROMPTS) + _CHECKED_TOKENS) // size)
    if runner.num_blocks < needed * len(_CHECKED_PROMPTS) or max(_CHECKED_PROMPTS) + _CHECKED_TOKENS > max_length:
        return None  # no room
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(runner.vocab_size, (n,), generator=generator).tolist() for n in _CHECKED_PROMPTS]
    tables = [list(range(row * needed, (row + 1) * needed)) for row in range(len(sequences))]
    computed = [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for _ in range(_CHECKED_TOKENS):
        batch = _flat_batch(sequences, computed, tables, size, device)
        for row, logits in enumerate(runner.run(batch)):
            found[row].append(logits)
            computed[row] = len(sequences[row])
            sequences[row].append(int(logits.argmax()))
    forward = CausalForward(model)
    for row, tokens in enumerate(sequences):
        prompt = _CHECKED_PROMPTS[row]
        ids = torch.tensor(tokens[:-1], device=device)
        rows = torch.arange(prompt - 1, len(ids), device=device)
        with torch.inference_mode():
            plain = forward(ids, None, rows)
        difference = (torch.stack(found[row]) - plain).abs().max().item()
        allowed = _tolerance(model, runner) * max(plain.std().item(), 1e-6)
        if not difference <= allowed:
            return f"its first logits differ from the plain model's by {difference:.3g} (allowed {allowed:.3g})"
    return None


def measure_step_cost(runner: ModelRunner, device: torch.device, max_tokens: int) -> StepCost:
    """Measure a step of one token and one of many tokens of a single sequence."""
    many = min(max_tokens, 64, runner.num_blocks * runner.block_size)

    def seconds(count: int) -> float:
        table = [list(range(-(-count // runner.block_size)))]
        batch = _flat_batch([[0] * count], [0], table, runner.block_size, device)
        times = []
        for _ in range(2):
            began = time.perf_counter()
            runner.run(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
            runner.release(0)
        return min(times)

    one, all_of_them = seconds(1), seconds(many)
    return StepCost(0.0, one, max(all_of_them / many, 1e-9), one / 1e5)


def _flat_batch(
    sequences: list[list[int]], computed: list[int], tables: list[list[int]], size: int, device: torch.device
) -> StepBatch:
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for tokens, first, blocks in zip(sequences, computed, tables, strict=True):
        ids += tokens[first:]
        positions += range(first, len(tokens))
        slots += [blocks[place // size] * size + place % size for place in range(first, len(tokens))]
        starts.append(len(ids))
    return StepBatch(
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int32, device=device),
        torch.tensor(tables, dtype=torch.int32, device=device),
        torch.tensor(slots, device=device),
        torch.tensor(starts[1:], device=device) - 1,
        list(range(len(sequences))),
        [None] * len(sequences),
    )


def _tolerance(model: nn.Module, runner: ModelRunner) -> float:
    """Return the difference of logits that rounding explains, in standard deviations of the logits."""
    wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    narrow_cache = getattr(runner, "kv_dtype", None) not in (None, torch.float32)
    return 2e-3 if wide and not narrow_cache else 0.25


def _block_counter(options: EngineOptions, longest: int, model: nn.Module) -> Callable[[int], int]:
    def count(block_nbytes: int) -> int:
        if options.kv_cache_tokens is not None:
            return -(-options.kv_cache_tokens // options.block_size)
        device = next(model.parameters()).device
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            memory = free - (1 - options.gpu_memory_utilization) * total
        else:
            memory = available_memory(ranks=1) * _CACHE_SHARE
        enough = -(-longest // options.block_size) * options.max_sequences
        blocks = min(int(memory // max(block_nbytes, 1)), enough)
        if blocks < 1:
            raise ConfigError(
                f"{memory / 1e9:.2f} GB are free for the KV cache, and a block takes {block_nbytes / 1e9:.2f} GB; free "
                "memory or set kv_cache_tokens"
            )
        return blocks

    return count
