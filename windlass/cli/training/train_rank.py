"""Run of one rank: model, engine, data, training loop, and the results on rank 0."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

import windlass
from windlass import watchdog
from windlass.base.atomic_file import replace_directory, temporary_path_beside
from windlass.base.errors import CheckpointError, RequestError
from windlass.base.log import logger
from windlass.cli.training.loss_plot import plot_loss
from windlass.cli.training.model_builder import build_model
from windlass.cli.training.run_failure import describe_failure, record_failure, stopped_marker_path
from windlass.cli.training.run_metrics import read_rows
from windlass.cli.training.stop_signals import INTERRUPTED_EXIT_CODE, StopSignals
from windlass.cli.training.teacher import attach_teacher, without_projection
from windlass.cli.training.text_continuation import generate_continuation
from windlass.cli.training.train_loop import TrainLoop
from windlass.cli.training.training_plan import TrainingPlan, read_plan, write_text
from windlass.comm.rank_group import world_group
from windlass.config import Config, load_config
from windlass.data.held_out import HeldOutSet
from windlass.data.resumable_loaders import SequenceLoader
from windlass.data.token_file import TokenFile, open_tokens
from windlass.data.tokenizer import load_tokenizer
from windlass.initialize import setup_distributed

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def export_model(model: Any, state: Mapping[str, torch.Tensor], tokenizer_dir: Path, target: Path) -> None:
    """Write weights, configuration and tokenizer to `target`. The directory appears complete or not at all.

    Args:
        model: the transformers model under training. Only its class and configuration are used, because its
            parameters may be sharded.
        state: full tensors by the names in the model's state dict.

    Raises:
        CheckpointError: the weights do not fit the model, or they cannot be written.
    """
    partial = temporary_path_beside(target)
    full = _model_with_weights(model, state)
    try:
        partial.mkdir(parents=True)
        full.save_pretrained(partial)
        for name in _TOKENIZER_FILES:
            if (tokenizer_dir / name).is_file():
                shutil.copyfile(tokenizer_dir / name, partial / name)
        replace_directory(partial, target)
    except (OSError, SafetensorError) as error:  # safetensors raises its own exception type for a full disk
        raise CheckpointError(
            f"cannot write the exported model to {target}: {error}; free some space or choose another --out"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _model_with_weights(model: Any, state: Mapping[str, torch.Tensor]) -> Any:
    with torch.device("meta"):
        full = type(model)(model.config)
    missing, unexpected = full.load_state_dict(dict(state), strict=False, assign=True)
    full.tie_weights()
    tied = {name for name, tensor in full.state_dict().items() if not tensor.is_meta}
    missing = [name for name in missing if name not in tied]
    if missing or unexpected:
        raise CheckpointError(
            f"the weights do not fit {type(model).__name__}: missing {missing[:4]}, unexpected {list(unexpected)[:4]}; "
            "use `windlass export` on the checkpoint"
        )
    full.config.use_cache = True
    return full


def run_rank(plan_path: Path, failure_path: Path) -> int:
    """Run one rank. Return the exit code: 0, 1 after a failure, or 130 after a request to stop."""
    try:
        plan = read_plan(plan_path)
        if train_on_rank(plan, StopSignals(failure_path)):
            return 0
        stopped_marker_path(failure_path).touch()
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        rank = int(os.environ.get("RANK", "0"))
        first = record_failure(failure_path, describe_failure(error, rank))
        if first and os.environ.get("WINDLASS_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        watchdog.report_failure(error)
        return 1


def with_run_record(plan: TrainingPlan) -> dict[str, Any]:
    """Return the configuration of a run, with a `jsonl_monitor` in the run's folder unless the
    configuration has this section."""
    return {"jsonl_monitor": {"enabled": True, "output_path": str(plan.folder)}, **plan.config}


def _uses_sharded_init(config: Config) -> bool:
    """Return True if the model is built sharded: at ZeRO stage 3, and with pp, ep or tp unless layers are partitioned
    by measured time, which needs the full model."""
    axes = config.parallel
    is_partitioned = axes.pp * axes.ep * axes.tp > 1 and config.pipeline.partition_method != "time"
    return is_partitioned or config.zero_optimization.stage == 3


def train_on_rank(plan: TrainingPlan, stop_signals: StopSignals) -> bool:
    """Run the training on this rank. Return False if it was stopped before its end.

    Raises:
        WindlassError: the run failed.
    """
    tokens = open_tokens(plan.token_file)
    tokenizer = load_tokenizer(Path(plan.tokenizer))
    config = load_config(plan.config)
    setup_distributed(config)
    with windlass.zero.Init(config_dict_or_path=config, enabled=_uses_sharded_init(config)):
        model = build_model(
            plan.model,
            tokenizer.vocab_size,
            plan.seq_len,
            plan.seed,
            tokenizer.eos,
            trust_remote_code=plan.trust_remote_code,
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    teacher = attach_teacher(model, config, plan.config, trust_remote_code=plan.trust_remote_code)
    engine, *_ = windlass.initialize(model=model, config=with_run_record(plan))
    rank, (readers, reader) = dist.get_rank(), engine.data_loading_ranks
    world_group().barrier()  # from here on a stop request stops all ranks together
    stop_signals.install()
    if rank == 0:
        logger.info(
            "model %s: %.2f million parameters, world size %d (%s), ZeRO stage %d, %d tokens a step",
            plan.model,
            parameters / 1e6,
            dist.get_world_size(),
            engine.mesh.grid,
            engine.zero_optimization_stage(),
            engine.train_batch_size() * plan.seq_len,
        )
    loader = SequenceLoader(
        tokens.train,
        plan.seq_len,
        engine.train_micro_batch_size_per_gpu(),
        rank=reader,
        world_size=readers,
        seed=plan.seed,
        digest=tokens.header.digest,
    )
    held_out = HeldOutSet(tokens.held_out, tokens.header.eval_bytes, plan.seq_len)
    trainer = TrainLoop(engine, loader, held_out, plan, stop_signals)
    if plan.resume:
        trainer.load()
    if not trainer.run():
        return False
    if teacher is not None:
        teacher.destroy()
    state = engine.full_state_dict()
    if rank == 0:
        write_results(plan, trainer, tokens, without_projection(state))
    world_group().barrier()
    return True


def write_results(plan: TrainingPlan, loop: TrainLoop, tokens: TokenFile, state: dict[str, Any]) -> None:
    """Export the model, generate a sample, plot the loss, and write the result file for the parent, on rank 0."""
    export_model(loop.engine.module, state, Path(plan.tokenizer), plan.export_folder)
    prompt = plan.prompt
    if prompt is None:
        beginning = tokens.held_out[1 : 1 + min(24, plan.seq_len // 2)].tolist()
        prompt = load_tokenizer(Path(plan.tokenizer)).backend.decode(beginning)
    sample = ""
    if plan.sample_tokens:
        try:
            sample = generate_continuation(
                plan.export_folder,
                prompt,
                max_new_tokens=plan.sample_tokens,
                seed=plan.seed,
                trust_remote_code=plan.trust_remote_code,
            )
        except RequestError as error:  # a prompt that is too long must not lose the results of the run
            logger.warning("the run has no sample: %s", error)
    header = tokens.header
    drawn = plot_loss(
        read_rows(plan.metrics_file),
        plan.loss_plot,
        header.train_bytes / max(header.train_tokens, 1),
        f"{plan.model}: held-out bits per byte {loop.initial_bits_per_byte:.2f} -> {loop.current_bits_per_byte:.2f}",
    )
    result = {
        "step": loop.step,
        "bits_before": loop.initial_bits_per_byte,
        "bits_after": loop.current_bits_per_byte,
        "epochs": loop.loader.epoch,
        "checkpoint": str(plan.checkpoint_folder / f"step{loop.step}"),
        "picture": str(plan.loss_plot) if drawn else None,
        "exported": str(plan.export_folder),
        "prompt": prompt,
        "sample": sample,
    }
    write_text(plan.result_file, json.dumps(result, indent=2) + "\n")
