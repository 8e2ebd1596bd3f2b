"""The whole of one rank's run: model, engine, data, loop, and on rank 0 what the run leaves."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

import windlass
from windlass import watchdog
from windlass.base.log import logger
from windlass.cli.training.export import export_model
from windlass.cli.training.failure import describe_failure, record_failure, stopped_marker
from windlass.cli.training.interrupt import EXIT_CODE, Interrupt
from windlass.cli.training.loop import Trainer
from windlass.cli.training.metrics import read_rows
from windlass.cli.training.model import build_model
from windlass.cli.training.picture import draw_loss
from windlass.cli.training.plan import Plan, read_plan, write_text
from windlass.cli.training.sample import continue_text
from windlass.config import Config, load
from windlass.data.held_out import HeldOut
from windlass.data.loader import SequenceLoader
from windlass.data.token_file import TokenFile, open_tokens
from windlass.data.tokenizer import load_tokenizer
from windlass.initialize import meet


def run_rank(plan_path: Path, failure_path: Path) -> int:
    """Runs one rank; the exit code is 0, 1 after a failure, or 130 when it was asked to stop."""
    try:
        plan = read_plan(plan_path)
        if train(plan, Interrupt(failure_path)):
            return 0
        stopped_marker(failure_path).touch()
        return EXIT_CODE
    except Exception as error:
        rank = int(os.environ.get("RANK", "0"))
        first = record_failure(failure_path, describe_failure(error, rank))
        if first and os.environ.get("WINDLASS_DEBUG", "0") not in ("", "0"):
            traceback.print_exc()
        watchdog.failed(error)
        return 1


def _in_parts(config: Config) -> bool:
    """Whether no rank will have the whole model, nor needs it on the way."""
    axes = config.parallel
    cut = axes.pp * axes.ep * axes.tp > 1 and config.pipeline.balances != "time"
    return cut or config.zero_optimization.stage == 3


def train(plan: Plan, interrupt: Interrupt) -> bool:
    """The whole run on this rank; False if it was stopped before its end.

    Raises:
        WindlassError: whatever ends it early.
    """
    tokens = open_tokens(plan.tokens)
    tokenizer = load_tokenizer(Path(plan.tokenizer))
    config = load(plan.config)
    meet(config)
    with windlass.zero.Init(config_dict_or_path=config, enabled=_in_parts(config)):
        model = build_model(
            plan.model,
            tokenizer.vocab_size,
            plan.seq_len,
            plan.seed,
            tokenizer.eos,
            trust_remote_code=plan.trust_remote_code,
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = windlass.initialize(model=model, config=plan.config)
    rank, (readers, reader) = dist.get_rank(), engine.readers
    dist.barrier()  # from here on all ranks stop together
    interrupt.install()
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
    held_out = HeldOut(tokens.held_out, tokens.header.eval_bytes, plan.seq_len)
    trainer = Trainer(engine, loader, held_out, plan, interrupt)
    if plan.resume:
        trainer.load()
    if not trainer.run():
        return False
    state = engine.full_state_dict()
    if rank == 0:
        finish(plan, trainer, tokens, state)
    dist.barrier()
    return True


def finish(plan: Plan, trainer: Trainer, tokens: TokenFile, state: dict[str, Any]) -> None:
    """Exports the model, lets it write, draws the picture, and leaves the result for the parent; on rank 0."""
    export_model(trainer.engine.module, state, Path(plan.tokenizer), plan.exported)
    prompt = plan.prompt
    if prompt is None:
        prompt = load_tokenizer(Path(plan.tokenizer)).backend.decode(tokens.held_out[1:25].tolist())
    sample = ""
    if plan.sample_tokens:
        sample = continue_text(
            plan.exported,
            prompt,
            max_new_tokens=plan.sample_tokens,
            seed=plan.seed,
            trust_remote_code=plan.trust_remote_code,
        )
    header = tokens.header
    drawn = draw_loss(
        read_rows(plan.metrics),
        plan.picture,
        header.train_bytes / max(header.train_tokens, 1),
        f"{plan.model}: held-out bits per byte {trainer.bits_before:.2f} -> {trainer.bits_now:.2f}",
    )
    result = {
        "step": trainer.step,
        "bits_before": trainer.bits_before,
        "bits_after": trainer.bits_now,
        "epochs": trainer.loader.epoch,
        "checkpoint": str(plan.checkpoints / f"step{trainer.step}"),
        "picture": str(plan.picture) if drawn else None,
        "exported": str(plan.exported),
        "prompt": prompt,
        "sample": sample,
    }
    write_text(plan.result, json.dumps(result, indent=2) + "\n")
