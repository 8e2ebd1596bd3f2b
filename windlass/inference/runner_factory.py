"""Choice of the runner of a model, check of its first logits, and measurement of step times."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from windlass.base.errors import CommunicationError, ConfigError, ModelError, StorageError, WindlassError
from windlass.base.log import logger
from windlass.compress.split_experts import SplitExperts
from windlass.inference.decode_graphs import CudaGraphCapture
from windlass.inference.engine_options import EngineOptions
from windlass.inference.model_forward import CausalForward, find_device, run_probe
from windlass.inference.own_cache_runner import OwnCacheModelRunner
from windlass.inference.packed_modules import PackedModules, can_pack, find_other_dtype, pack_layers, pack_modules
from windlass.inference.paged_runner import PagedModelRunner
from windlass.inference.parallel_model import is_sharded, shard_for_inference
from windlass.inference.rank_channel import RankChannel
from windlass.inference.stage_link import StageForward, open_stage_link, split_for_inference
from windlass.inference.step_batch import ModelRunner, StepBatch
from windlass.inference.step_cost import StepCost
from windlass.inference.streamed_modules import StreamedModules
from windlass.kernels.coded_formats import CodedWeightFormat
from windlass.kernels.packed_linear import PackedLinear
from windlass.kernels.weight_format import get_weight_format
from windlass.parallel.pipeline.stub_modules import drop_aliases
from windlass.storage.staging_memory import available_memory

_WIDE = ("fp32", "bf16")
_FINE = (*_WIDE, "fp16", "int8", "fp8")  # formats of 8 bits or more; others, also registered ones, may have fewer
_CHECKED_TOKENS = 8
_STREAMED_CHECKED_TOKENS = 2  # few, because each forward reads all weights
_CHECKED_PROMPTS = (11, 5)  # lengths of the prompts in tokens
_OWN_CACHE_TOKENS = 1 << 16
_MEASURED_TOKENS = (1, 8, 32, 128)  # sizes of the steps that are measured, in addition to the largest
_LEFT_TOKENS = 24  # tokens of a sequence that are left for the steps that measure attention
_LONG_STEP = 0.5  # seconds; if a step other than the smallest takes longer, no larger ones are measured
_CACHE_SHARE = 0.4  # fraction of the free host memory for the KV cache


def make_runner(
    model: nn.Module,
    options: EngineOptions,
    max_model_len: int,
    *,
    owned: bool = False,
    ranks: RankChannel | None = None,
    streamed: StreamedModules | None = None,
) -> ModelRunner:
    """Return the fastest runner that computes the same logits as the model. Collective over `ranks`.

    Args:
        max_model_len: largest number of tokens of a sequence, if `options.max_model_len` is None.
        owned: True if the engine is the only user of the model, so that its weights may be packed and freed.
        ranks: ranks over which the model is sharded, in place; None: one rank.
        streamed: weights of the model that are read from a file; None: all are in memory.

    Raises:
        ConfigError: the options do not fit the model, e.g. weights are to be streamed and the model is a live module;
            or no memory is free for the KV cache.
        ModelError: the model is an encoder-decoder, cannot be sharded or served over pp, or computes other logits with
            packed weights.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder; windlass serves causal language models, which have only "
            "a decoder"
        )
    if options.streams_weights and streamed is None:
        raise ConfigError(
            f"weights_tier is {options.weights_tier!r}, but a live module is in memory already; give its directory"
        )
    longest = options.max_model_len or max_model_len
    shards = ranks is not None and not is_sharded(model)
    pipeline = None if ranks is None else ranks.pipeline
    if ranks is not None and shards:
        if (held := _packed_format(model)) is not None:
            raise ConfigError(
                f"the model is packed as {held!r}, which tp, ep and pp do not shard; give the unquantized model "
                "and the option weights"
            )
        if open_stage_link(model, pipeline) is None:
            ranks.broadcast_model(model)
            if pipeline is not None:
                split_for_inference(model, pipeline)
    link = open_stage_link(model, pipeline)
    if ranks is not None and link is not None:
        ranks.on_close(link.drop_transfers)
    forward = CausalForward(model) if link is None else StageForward(link)
    # A format of few bits changes logits more than an error of a runner would, so the packed model is the reference. So
    # do rounded inputs in a mixture of experts: the router of a token with nearly equal scores takes another expert.
    routes = owned and streamed is None and any(isinstance(one, SplitExperts) for one in model.modules())
    coarse = options.weights is not None and options.weights not in _FINE or routes and options.activations != "float"
    plain = PlainLogits(model, longest, forward, streamed) if options.check_at_load and not coarse else None
    if ranks is not None and shards:
        if options.weights is not None and owned:
            pack_before_sharding(model, options.weights)
        shard_for_inference(model, ranks)
    records = options.cuda_graphs and owned and ranks is None and find_device(model).type == "cuda"
    packed = streamed or _pack(model, options, forward, owned=owned, ranks=ranks)
    if packed is not None and owned and link is not None:
        drop_aliases(model)  # frees the weight of a tied embedding, which the packed head replaces
    if options.check_at_load and coarse and ranks is None:
        plain = PlainLogits(model, longest, forward)
    try:
        runner = PagedModelRunner(
            model,
            block_size=options.block_size,
            num_blocks=_block_counter(options, longest, model, ranks),
            kv_dtype=options.kv_torch_dtype,
            packed=packed,
            forward=forward,
            has_scratch=records,
            max_model_len=longest,
        )
    except (ConfigError, CommunicationError, StorageError):
        raise
    except Exception as error:  # code of any model runs here; the runner with the model's own cache is tried next
        reason = _describe(error)
    else:
        # A recorded step needs fixed addresses, which stacked matrices that are streamed do not have.
        replayable = streamed is None or not streamed.stacked
        if packed is not None and owned and replayable and ranks is None:
            _compile(runner, plain, options, longest)
        if records and isinstance(runner, PagedModelRunner):
            runner.record_decodes(CudaGraphCapture(), options.max_sequences, -(-longest // options.block_size))
        problem = None if plain is None else _find_paged_problem(runner, plain, options)
        if ranks is not None and not ranks.minimum(problem is None):
            problem = problem or "another rank found a difference"  # so that all ranks choose the same runner
        if problem is None:
            return runner
        runner.free_cache()
        reason = problem
    if link is not None:
        raise ModelError(
            f"{type(model).__name__} cannot be served over pp, which needs a paged KV cache: {reason}; use tp instead"
        )
    return _make_own_cache_runner(model, options, packed, plain, ranks, longest, reason)


def _make_own_cache_runner(
    model: nn.Module,
    options: EngineOptions,
    packed: PackedModules | None,
    plain: PlainLogits | None,
    ranks: RankChannel | None,
    longest: int,
    reason: str,
) -> ModelRunner:
    """Return a runner that uses the model's own cache, or no cache if that cache gives other logits or an error. Log
    `reason`: why no paged KV cache is used. Collective over `ranks`.

    Raises:
        ModelError: the packed weights give other logits than the model's own weights.
    """
    tokens = options.kv_cache_tokens or max(_OWN_CACHE_TOKENS, longest)
    make = partial(
        OwnCacheModelRunner,
        model,
        block_size=options.block_size,
        num_blocks=-(-tokens // options.block_size),
        packed=packed,
    )
    own = make()
    problem = None if plain is None or not own.keeps_cache else _find_problem(own, plain, options)
    if ranks is not None and not ranks.minimum(problem is None):
        problem = problem or "another rank found a problem"
    if problem is not None:
        own, reason = make(uses_cache=False), f"{reason}; nor can its own cache: {problem}"
    if packed is not None and plain is not None and not own.keeps_cache:
        difference = plain.find_last_difference(own, options)
        if difference is not None:
            raise ModelError(
                f"{type(model).__name__} computes other logits with packed weights than with its own: "
                f"{difference}; serve the module itself, with deterministic=False and without weights"
            )
    logger.warning(
        "%s runs with %s, because a paged KV cache cannot be used: %s", type(model).__name__, own.description, reason
    )
    return own


def _find_paged_problem(runner: ModelRunner, plain: PlainLogits, options: EngineOptions) -> str | None:
    """Return the reason for which a runner with a paged cache cannot be used; None if it can."""
    try:
        return plain.find_difference(runner, options)
    except (CommunicationError, StorageError):
        raise
    except Exception as error:  # code of any model runs here
        return _describe(error)


def _describe(error: Exception) -> str:
    """Return one line that describes an error of a model's forward."""
    line = str(error).split("\n")[0]
    return line if isinstance(error, WindlassError) else f"its forward raised {type(error).__name__}: {line}"


def _find_problem(own: OwnCacheModelRunner, plain: PlainLogits, options: EngineOptions) -> str | None:
    """Return the reason for which the model's own cache cannot be used; None if it can."""
    try:
        problem = plain.find_difference(own, options)
        own.free_cache()
        # if attention in the prompt is not causal, the plain forward has other logits; then `generate` is the reference
        return None if problem is None or plain.generates_as(own, options) else problem
    except (CommunicationError, StorageError):
        raise
    except Exception as error:  # code of any model runs here; the model may still compute without a cache
        return _describe(error)
    finally:
        own.free_cache()


def _compile(runner: PagedModelRunner, plain: PlainLogits | None, options: EngineOptions, longest: int) -> None:
    """Let the runner replay a recorded step, unless the replay gives other logits than `plain`, or the forward raises
    for the tokens of a recording (e.g. because it has fewer positions). Log the reason if the runner calls the modules
    instead.
    """
    try:
        problem = runner.compile(options.max_tokens_per_step, -(-longest // options.block_size))
        if problem is None and plain is not None:
            problem = plain.find_difference(runner, options)
    except (CommunicationError, StorageError):
        raise
    except Exception as error:  # code of any model runs here
        runner.program = None
        name = type(runner.model).__name__
        logger.warning("%s: steps run its modules, because they could not be recorded: %s", name, _describe(error))
        return
    if problem is not None:
        runner.program = None
        logger.info("%s: steps run its modules, not a recording, because %s", type(runner.model).__name__, problem)


class PlainLogits:
    """Logits of the plain model for two short random sequences, with which a runner is compared.

    Args:
        max_length: maximum number of tokens of the model; if it is too small for the comparison, nothing is compared,
            and the log has the reason.
        forward: forward of the model.
        streamed: weights that are read for each forward, so that fewer tokens are compared; None: all are in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        max_length: int,
        forward: CausalForward | StageForward,
        streamed: StreamedModules | None = None,
    ) -> None:
        self._steps = _CHECKED_TOKENS if streamed is None else _STREAMED_CHECKED_TOKENS
        generator = torch.Generator().manual_seed(0)
        self._device = find_device(model)
        self._wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
        self._sequences: list[list[int]] = []
        self._logits: list[torch.Tensor] = []
        self._has_room = True
        needed = max(_CHECKED_PROMPTS) + self._steps
        if needed > max_length:
            self._note_no_room(f"max_model_len is {max_length}, and the comparison needs {needed} tokens")
            return
        one = torch.zeros(1, dtype=torch.long, device=self._device)
        values = nullcontext() if streamed is None else streamed.without_values()
        with torch.inference_mode(), values:
            vocabulary = forward(one, None, one).shape[-1]
        padding = getattr(getattr(model, "config", None), "pad_token_id", None)
        padding = padding if isinstance(padding, int) else -1
        with torch.inference_mode():
            for prompt in _CHECKED_PROMPTS:
                ids = torch.randint(vocabulary, (prompt + self._steps - 1,), generator=generator)
                ids[ids == padding] = 0 if padding else 1  # RoBERTa's positions do not count padding
                rows = torch.arange(prompt - 1, len(ids))
                self._sequences.append(ids.tolist())
                self._logits.append(forward(ids.to(self._device), None, rows.to(self._device)))

    def find_difference(self, runner: ModelRunner, options: EngineOptions) -> str | None:
        """Run the sequences together, first their prompts and then token by token, and compare the logits.

        Call this before other sequences exist, because it writes to the KV cache.

        Returns:
            Description of the difference if it is larger than rounding explains; None if it is not, or if the sequences
            do not fit.
        """
        size = runner.block_size
        needed = -(-(max(_CHECKED_PROMPTS) + self._steps) // size)
        if not self._sequences:
            return None
        if runner.num_blocks < needed * len(self._sequences):
            self._note_no_room(
                f"the KV cache has {runner.num_blocks} blocks of {size} tokens, and the comparison needs "
                f"{needed * len(self._sequences)}; raise kv_cache_tokens"
            )
            return None
        tables = [list(range(row * needed, (row + 1) * needed)) for row in range(len(self._sequences))]
        computed = [0] * len(self._sequences)
        found: list[list[torch.Tensor]] = [[] for _ in self._sequences]
        for step in range(self._steps):
            known = [tokens[: prompt + step] for tokens, prompt in zip(self._sequences, _CHECKED_PROMPTS, strict=True)]
            for row, logits in enumerate(runner.run(_flat_batch(known, computed, tables, size, self._device))):
                found[row].append(logits.clone())
            computed = [len(tokens) for tokens in known]
        for logits, plain in zip(found, self._logits, strict=True):
            if (problem := self._describe_difference(torch.stack(logits), plain, options)) is not None:
                return problem
        return None

    def _note_no_room(self, reason: str) -> None:
        if self._has_room:
            logger.warning("the first logits are not compared with those of the plain model: %s", reason)
        self._has_room = False

    def find_last_difference(self, own: OwnCacheModelRunner, options: EngineOptions) -> str | None:
        """Compare the runner's logits of each sequence's last token with the plain model's. The last token attends to
        the full sequence even if attention is not causal. Return the difference as `find_difference` does.
        """
        if not self._sequences:
            return None
        # placeholders: a runner with the model's own cache has no KV blocks
        tables = [[0] * max(map(len, self._sequences))] * len(self._sequences)
        batch = _flat_batch(self._sequences, [0] * len(tables), tables, own.block_size, self._device)
        try:
            logits = own.run(batch)
        finally:
            own.free_cache()
        return self._describe_difference(logits, torch.stack([plain[-1] for plain in self._logits]), options)

    def _describe_difference(self, logits: torch.Tensor, plain: torch.Tensor, options: EngineOptions) -> str | None:
        difference = (logits - plain).abs().max().item()
        allowed = self._tolerance(options) * max(plain.std().item(), 1e-6)
        if difference <= allowed:
            return None
        return f"its first logits differ from the plain model's by {difference:.3g} (allowed {allowed:.3g})"

    def generates_as(self, own: OwnCacheModelRunner, options: EngineOptions) -> bool:
        """Return True if a runner, with both sequences in one batch, has the logits of the model's own `generate`."""
        from transformers import GenerationConfig

        settings = GenerationConfig(
            **{"do_sample": False, "use_cache": True, "max_new_tokens": _CHECKED_TOKENS, "pad_token_id": 0},
            return_dict_in_generate=True,
            output_logits=True,
        )
        answers = []
        for tokens, prompt in zip(self._sequences, _CHECKED_PROMPTS, strict=True):
            ids = torch.tensor([tokens[:prompt]], device=self._device)
            found = own.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
            answers.append((found.sequences[0].tolist(), prompt, found.logits))
        for step in range(max(len(logits) for _, _, logits in answers)):
            running = [number for number, (_, _, logits) in enumerate(answers) if step < len(logits)]
            known = [answers[number][0][: answers[number][1] + step] for number in running]
            computed = [len(tokens) - 1 if step else 0 for tokens in known]
            tables = [[0] * max(len(tokens) for tokens in known)] * len(known)
            batch = _flat_batch(known, computed, tables, own.block_size, self._device)
            for number, row in zip(running, own.run(StepBatch(*batch.values, running)), strict=True):
                logits = answers[number][2][step][0].float()
                allowed = self._tolerance(options) * max(logits.std().item(), 1e-6)
                if not (row - logits).abs().max().item() <= allowed:
                    return False
        return True

    def _tolerance(self, options: EngineOptions) -> float:
        """Return the difference of logits that rounding explains, in standard deviations of the logits."""
        narrow = options.kv_torch_dtype not in (None, torch.float32) or options.weights not in (None, "fp32")
        if not self._wide or narrow:
            return 1.0 if options.weights not in (None, "fp32", "bf16") else 0.25
        return 2e-3


def _packed_format(model: nn.Module) -> str | None:
    """Return the format of the first layer that is packed in integers or float8, else that of the first packed layer;
    None: no layer is packed."""
    names = [module.format.name for module in model.modules() if isinstance(module, PackedLinear)]
    return next((name for name in names if name not in ("fp32", "bf16", "fp16")), names[0] if names else None)


def _pack(
    model: nn.Module,
    options: EngineOptions,
    forward: CausalForward | StageForward,
    *,
    owned: bool,
    ranks: RankChannel | None,
) -> PackedModules | None:
    """Return packed weights if the options request them, or if the model is owned and `deterministic` is not False;
    else None. Where `can_pack` is False, replace layers by `PackedLinear` if a format is requested, and return None.

    Raises:
        ConfigError: the options request packed weights that the model cannot have.
    """
    wanted = owned if options.deterministic is None else options.deterministic
    if options.weights is not None and not owned:
        raise ConfigError(f"weights is {options.weights!r}, but a live module is served as it is; give its directory")
    held = _packed_format(model)
    prepared = ranks is not None and held == options.weights  # packed by `pack_before_sharding`
    if options.weights is not None and held is not None and not prepared:
        raise ConfigError(
            f"weights is {options.weights!r}, but the model is packed as {held!r} already; leave weights out"
        )
    if options.deterministic and (other := find_other_dtype(model)) is not None:
        raise ConfigError(
            f"deterministic is True, but {other[0]} is {other[1]}, and native products need float32 or bfloat16; "
            "convert the model, or leave deterministic out"
        )
    if not (wanted or options.weights) or not can_pack(model):
        if options.deterministic:
            raise ConfigError(
                "deterministic is True, which needs the native kernels and a model on the CPU; leave deterministic out"
            )
        if options.weights is not None and not prepared:
            pack_layers(model, options.weights)
        return None
    return pack_modules(
        model,
        partial(run_probe, forward),
        weight_format=options.weights,
        activations=options.activations,
        frees_weights=owned,
    )


def pack_before_sharding(model: nn.Module, weight_format: str) -> None:
    """Pack those layers that have to be packed before the model is sharded.

    With native kernels, these are all layers but the head, if `weight_format` is neither a `CodedWeightFormat` nor
    fp32 or bf16. Without native kernels, they are all layers. A shard then has the codes and scales of the full matrix.
    """
    native = can_pack(model)
    coded = isinstance(get_weight_format(weight_format), CodedWeightFormat)
    # A shard of a coded matrix may end inside a group of features. A sharded packed layer has panels in addition to its
    # packed bytes, so fp32 and bf16 would take more memory.
    if not native or not (coded or weight_format in _WIDE):
        pack_layers(model, weight_format, without_head=native)


def measure_step_cost(
    runner: ModelRunner,
    device: torch.device,
    max_tokens: int,
    longest: int,
    *,
    is_sharded: bool = False,
    streamed: StreamedModules | None = None,
) -> StepCost:
    """Measure steps of 1 to `max_tokens` tokens of a single sequence, and attention to the keys of these tokens.

    Call this before other sequences exist, because it writes to the KV cache.

    Args:
        longest: largest number of tokens of a sequence; no measured sequence is longer.
        is_sharded: True if other ranks compute the same steps; the number of steps then does not depend on their times.
        streamed: weights that are read for each step; None: all are in memory. The time of a step includes reading
            weights; the time of a token does not include waiting for them.
    """
    if streamed is not None:
        return _measure_streamed(runner, device, max_tokens, streamed)
    long_step = float("inf") if is_sharded else _LONG_STEP
    room = min(max_tokens, longest - _LEFT_TOKENS, runner.num_blocks * runner.block_size - _LEFT_TOKENS)
    table = [list(range(min(-(-longest // runner.block_size), runner.num_blocks)))]

    def seconds(first: int, count: int) -> float:
        batch = _flat_batch([[0] * (first + count)], [first], table, runner.block_size, device)
        began = time.perf_counter()
        runner.run(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    points: list[tuple[int, float]] = []
    for count in [size for size in _MEASURED_TOKENS if size < room] + [max(room, 1)]:
        times = []
        for _ in range(2):
            times.append(seconds(0, count))
            many = count
            runner.release(0)
            if points and times[-1] > long_step:
                break
        least = points[-1][1] * 1.001 if points else 0.0
        points.append((count, max(min(times), least, 1e-9)))
        if len(points) > 1 and min(times) > long_step:
            break
    fewest = points[0][1]
    token = points[-1][1] / points[-1][0]
    if len(points) == 1:
        return StepCost(0.0, fewest, token, fewest / 1e5)
    seconds(0, many)  # computes the tokens that the next steps attend to
    decode = min(seconds(many + place, 1) for place in range(2))
    # a model with its own cache computes a chunk token by token, so attention in chunks is not measured
    chunk = min(seconds(many + 2, 8), seconds(many + 10, 8)) if runner.computes_drafts else 0.0
    runner.release(0)
    expected = StepCost(points=tuple(points)).step_seconds(8, 0)
    return StepCost(
        weight_seconds=fewest,
        token_seconds=token,
        cached_token_seconds=max(decode - fewest, 0.0) / many,
        pair_seconds=max(chunk - expected, 0.0) / (8 * many),
        points=tuple(points),
    )


def _measure_streamed(
    runner: ModelRunner, device: torch.device, max_tokens: int, streamed: StreamedModules
) -> StepCost:
    """Measure the time of a step of one token, and the time of a step of many tokens without its waits for weights."""
    many = min(max_tokens, 64, runner.num_blocks * runner.block_size)

    def seconds(count: int, *, computing: bool = False) -> float:
        table = [list(range(-(-count // runner.block_size)))]
        batch = _flat_batch([[0] * count], [0], table, runner.block_size, device)
        times = []
        for _ in range(2):
            waited, began = streamed.stats.waited_seconds, time.perf_counter()
            runner.run(batch)
            passed = time.perf_counter() - began
            times.append(passed - (streamed.stats.waited_seconds - waited) if computing else passed)
            runner.release(0)
        return min(times)

    one, all_of_them = seconds(1), seconds(many, computing=True)
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


def _block_counter(
    options: EngineOptions, longest: int, model: nn.Module, ranks: RankChannel | None
) -> Callable[[int], int]:
    def count(block_nbytes: int) -> int:
        if options.kv_cache_tokens is not None:
            return -(-options.kv_cache_tokens // options.block_size)
        device = find_device(model)
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            memory = free - (1 - options.gpu_memory_utilization) * total
        else:
            sharing = options.host_engines * (1 if ranks is None else ranks.size)
            memory = available_memory(ranks=sharing) * _CACHE_SHARE
        enough = -(-longest // options.block_size) * options.max_sequences
        blocks = min(int(memory // max(block_nbytes, 1)), enough)
        if blocks < 1:
            raise ConfigError(
                f"{memory / 1e9:.2f} GB are free for the KV cache, and a block takes {block_nbytes / 1e9:.2f} GB; free "
                "memory or set kv_cache_tokens"
            )
        return blocks if ranks is None else ranks.minimum(blocks)

    return count
