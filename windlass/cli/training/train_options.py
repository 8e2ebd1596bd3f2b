"""Conversion of command line options to a plan: defaults, the configuration, the packed corpus, an earlier run."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.base.bounded_input import MAX_RANKS_PER_HOST
from windlass.base.errors import CheckpointError, ConfigError, DataError
from windlass.base.log import logger
from windlass.base.text import one_line, plural
from windlass.cli.training.default_recipe import (
    BUILT_IN_MODELS,
    DEFAULT_SEQ_LEN,
    DEFAULT_STEPS,
    DEFAULT_VOCAB_SIZE,
    TINY_MODEL,
    default_config,
    default_learning_rate,
    default_optimizer,
    fill_auto,
)
from windlass.cli.training.model_builder import config_file, declared_vocab_size
from windlass.cli.training.teacher import check_teacher
from windlass.cli.training.training_plan import TrainingPlan, read_plan
from windlass.config import load_config
from windlass.config.config_source import ConfigSource, read_source
from windlass.data.pack_corpus import PackedCorpus, pack_corpus
from windlass.data.token_file import TokenFileHeader, open_tokens
from windlass.data.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TrainOptions:
    """Options of the command line. None: not set; the default or, with `--resume`, the earlier value is used."""

    out: Path
    config: str | None = None
    model: str | None = None
    data: list[str] | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    text_field: str | None = None
    nproc: int | None = None
    pp: int | None = None
    tp: int | None = None
    sp: int | None = None
    ep: int | None = None
    steps: int | None = None
    seq_len: int | None = None
    lr: float | None = None
    eval_every: int | None = None
    eval_bytes: int | None = None
    save_every: int | None = None
    seed: int | None = None
    prompt: str | None = None
    sample_tokens: int | None = None
    trust_remote_code: bool = False
    resume: bool = False
    overwrite: bool = False


def make_training_plan(options: TrainOptions) -> TrainingPlan:
    """Check the options, pack the corpus, and write the plan to the run's folder.

    Raises:
        WindlassError: options, configuration, model, data or an earlier run in the folder are wrong.
    """
    _require_in_range(options)
    plan = _plan_resumed_run(options) if options.resume else _plan_new_run(options)
    _check_config(plan.config, plan.nproc)
    try:
        plan.write()
    except OSError as error:
        raise ConfigError(
            f"cannot write to --out {plan.out}: {error.strerror or error}; choose another folder"
        ) from error
    return plan


def read_config(source: str | ConfigSource | None, steps: int, lr: float) -> dict[str, Any]:
    """Return the ds_config of a run: read, checked, and with "auto" values filled in.

    Raises:
        ConfigError: the configuration cannot be read, or is wrong.
    """
    if source is None:
        return fill_auto(default_config(), steps, lr)
    found = read_source(source)  # only once, because a pipe can be read only once
    load_config(found)  # validated as it was read, so that errors name the file and its lines
    data = dict(found.data)
    if data.get("optimizer") is None:
        logger.info("the configuration names no optimizer; using AdamW")
        data["optimizer"] = default_optimizer()
    return fill_auto(data, steps, lr)


def _plan_new_run(options: TrainOptions) -> TrainingPlan:
    steps = options.steps or DEFAULT_STEPS
    model = options.model or TINY_MODEL
    out = options.out
    # Cheap checks first, so that a mistake in the configuration does not cost the minutes of packing a corpus.
    source = None if options.config is None else read_source(options.config)
    config = _config_with_axes(read_config(source, steps, options.lr or default_learning_rate(model)), options)
    nproc = 1 if options.nproc is None else options.nproc
    if source is not None:
        load_config(source if not _given_axis_sizes(options) else config).resolve_batch(nproc, "--nproc")
    _check_config(config, nproc)
    vocab = declared_vocab_size(model)
    if (out / "checkpoint").exists() and not options.overwrite:
        raise CheckpointError(
            f"{out} already contains a run; add --resume to continue it, --overwrite to start over, "
            "or choose another --out"
        )
    tokenizer = options.tokenizer or _tokenizer_beside_model(model)
    started = time.monotonic()
    packed = pack_corpus(
        options.data or [],
        out,
        tokenizer_dir=tokenizer,
        vocab_size=options.vocab_size or min(DEFAULT_VOCAB_SIZE, vocab or DEFAULT_VOCAB_SIZE),
        text_field=options.text_field or "text",
        eval_bytes=2**17 if options.eval_bytes is None else options.eval_bytes,
    )
    check_teacher(config, packed.tokenizer_dir)
    _log_corpus(packed, time.monotonic() - started)
    return TrainingPlan(
        out=str(out),
        config=config,
        model=model,
        data=options.data or [],
        tokenizer=str(packed.tokenizer_dir),
        nproc=nproc,
        steps=steps,
        seq_len=options.seq_len or DEFAULT_SEQ_LEN,
        eval_every=_value_or_default(options.eval_every, max(1, steps // 4)),
        save_every=options.save_every or 0,
        seed=options.seed or 0,
        prompt=options.prompt,
        sample_tokens=_value_or_default(options.sample_tokens, 120),
        trust_remote_code=options.trust_remote_code,
    )


def _log_corpus(packed: PackedCorpus, seconds: float) -> None:
    header, full = packed.header, plural(packed.documents, "document")
    logger.info(
        "data: %s, %.1f MB of text; %s tokens to train on, %s held out (%s)",
        full if header.documents == packed.documents else f"{full}, split into {plural(header.documents, 'piece')}",
        (header.train_bytes + header.eval_bytes) / 1e6,
        f"{header.train_tokens:,}",
        f"{header.eval_tokens:,}",
        "reused" if packed.is_reused else f"packed in {seconds:.1f} s",
    )


def _plan_resumed_run(options: TrainOptions) -> TrainingPlan:
    old = read_plan(options.out / "run.json")
    fixed = ("model", "data", "tokenizer", "vocab_size", "text_field", "seq_len", "seed", "eval_bytes", "overwrite")
    option_values = {name: getattr(options, name) for name in fixed}
    given = [name for name, value in option_values.items() if value is not None and value is not False]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"--resume continues the run in {options.out} with its own settings; leave out {flags}")
    header = _read_token_header(options.out)
    steps = options.steps or old.steps
    changed: dict[str, Any] = {
        name: value
        for name in ("nproc", "eval_every", "save_every", "prompt", "sample_tokens")
        if (value := getattr(options, name)) is not None
    }
    if options.config is not None:
        changed["config"] = read_config(options.config, steps, options.lr or default_learning_rate(old.model))
    elif options.lr is not None:
        raise ConfigError("--lr has no effect on a resumed run without --config; leave it out")
    if _given_axis_sizes(options):
        changed["config"] = _config_with_axes(changed.get("config", old.config), options)
    if steps > old.steps and options.config is None:
        _warn_schedule_ends_early(old.config, steps)
    # The folder may have been moved since the earlier run, together with a tokenizer inside it.
    own = Path(old.tokenizer) == Path(old.out) / "tokenizer"
    tokenizer = str(options.out / "tokenizer") if own else old.tokenizer
    _require_same_tokenizer(Path(tokenizer), header)
    # The flag is not taken from the earlier run, because the run's folder may come from another user.
    changed["trust_remote_code"] = options.trust_remote_code
    return replace(old, out=str(options.out), tokenizer=tokenizer, steps=steps, resume=True, **changed)


def _warn_schedule_ends_early(config: dict[str, Any], steps: int) -> None:
    """Warn if the schedule ends before the run does: the remaining steps would keep its last learning rate."""
    total = (config.get("scheduler") or {}).get("params", {}).get("total_num_steps")
    if isinstance(total, int | float) and total < steps:
        logger.warning(
            "the schedule of this run ends at step %d of %d, after which the learning rate is constant; set another "
            "total_num_steps in --config to change that",
            total,
            steps,
        )


def _read_token_header(out: Path) -> TokenFileHeader:
    try:
        return open_tokens(out / "tokens.bin", verify=True).header
    except DataError as error:
        what = str(error).split("; delete")[0]
        raise DataError(
            f"{what}; restore it, or start over with --overwrite: this file determines the order of samples"
        ) from error


def _require_same_tokenizer(folder: Path, header: TokenFileHeader) -> None:
    tokenizer = load_tokenizer(folder)
    if (tokenizer.vocab_size, tokenizer.eos) != (header.vocab_size, header.eos):
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens and ends texts with {tokenizer.eos}; the "
            f"corpus was packed with {header.vocab_size} and {header.eos}: restore it, or start over with --overwrite"
        )


def _check_config(config: dict[str, Any], nproc: int) -> None:
    checked = load_config(config)
    refusals = checked.refusals()
    if refusals:
        raise ConfigError("the configuration has unsupported settings:\n" + "\n".join(f"  {item}" for item in refusals))
    checked.resolve_batch(nproc, "--nproc")


def _tokenizer_beside_model(model: str) -> Path | None:
    """Return the model's directory if the directory contains a tokenizer, else None."""
    if model in BUILT_IN_MODELS or model.startswith("hub:"):
        return None
    folder = config_file(model).parent
    return folder if os.path.isdir(model) and (folder / "tokenizer.json").is_file() else None


def _require_in_range(options: TrainOptions) -> None:
    limits = {
        **dict.fromkeys(("nproc", "pp", "tp", "sp", "ep"), (1, MAX_RANKS_PER_HOST)),
        "steps": (1, 10**12),
        "seq_len": (2, 2**30),
        "vocab_size": (258, 2**32),
        "eval_every": (0, 10**12),
        "eval_bytes": (1, 2**50),
        "save_every": (0, 10**12),
        "seed": (0, 2**63 - 1),
        "sample_tokens": (0, 10**6),
    }
    for name, (least, most) in limits.items():
        value = getattr(options, name)
        flag = name.replace("_", "-")
        if value is not None and value < least:
            raise ConfigError(f"--{flag} {value} must be at least {least}")
        if value is not None and value > most:
            raise ConfigError(f"--{flag} {one_line(str(value), 40)} must be at most {most:,}")
    if options.lr is not None and not 0 < options.lr < math.inf:
        raise ConfigError(f"--lr {options.lr} must be a positive number")
    if options.prompt is not None and re.search("[\ud800-\udfff]", options.prompt):  # a byte that is not UTF-8
        raise ConfigError(f"--prompt {options.prompt!r} is not valid UTF-8; write text in UTF-8")


def _given_axis_sizes(options: TrainOptions) -> dict[str, int]:
    """Return the axis sizes that were set as options."""
    return {axis: size for axis in ("pp", "tp", "sp", "ep") if (size := getattr(options, axis)) is not None}


def _config_with_axes(config: dict[str, Any], options: TrainOptions) -> dict[str, Any]:
    """Return the configuration, with axis sizes replaced by those set as options."""
    axes = _given_axis_sizes(options)
    return {**config, "parallel": {**config.get("parallel", {}), **axes}} if axes else config


def _value_or_default(value: int | None, default: int) -> int:
    return default if value is None else value
