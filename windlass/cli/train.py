"""Command `windlass train`: trains, measures and exports a model, given a corpus and a configuration."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.base.text import print_escaped
from windlass.cli.training.run_failure import TrainingRunError, read_failure, stopped_marker_path
from windlass.cli.training.stop_signals import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    from windlass.cli.training.train_options import TrainOptions
    from windlass.cli.training.training_plan import TrainingPlan
    from windlass.launch.exit_status import LaunchExitStatus

_WORKER_MODULE = "windlass.cli.train_worker"


def train(
    paths: Annotated[list[str] | None, typer.Argument(help="More data, in the form of --data.")] = None,
    config: Annotated[str | None, typer.Option(help="ds_config.json. [ZeRO stage 2 with AdamW]")] = None,
    model: Annotated[
        str | None, typer.Option(help="'tiny', 'tiny-moe', a Hugging Face config.json or directory, or hub:NAME.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="File, directory, glob, 'stdlib' (this Python's sources) or hub:NAME[@CONFIG][:SPLIT]; repeatable."
        ),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory. [a BPE learned from the data]")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Vocabulary size of the learned BPE. [4096]")] = None,
    text_field: Annotated[
        str | None, typer.Option(help="Field of JSON and Parquet records that holds the text. [text]")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Number of ranks on this machine. [1]")] = None,
    pp: Annotated[int | None, typer.Option(help="Number of pipeline stages, each with some of the layers. [1]")] = None,
    tp: Annotated[int | None, typer.Option(help="Number of ranks over which matrices are sharded. [1]")] = None,
    sp: Annotated[
        int | None, typer.Option(help="Number of ranks with different parts of the same sequences. [1]")
    ] = None,
    ep: Annotated[int | None, typer.Option(help="Number of data ranks over which experts are distributed. [1]")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, including those before a resume. [900]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Number of tokens in a sequence. [128]")] = None,
    lr: Annotated[float | None, typer.Option(help='Learning rate if the configuration has "auto" or none.')] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between held-out measurements. [a quarter of --steps]")
    ] = None,
    eval_bytes: Annotated[int | None, typer.Option(help="Text to hold out, in bytes. [131072]")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: only at the end. [0]")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of initial weights, data order and sample. [0]")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text that the sample at the end continues. [a held-out text]")
    ] = None,
    sample_tokens: Annotated[int | None, typer.Option(help="Length of the sample in tokens; 0: none. [120]")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python files that come with the model.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of all files of the run.")] = Path("windlass-run"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out at its exact step and sample.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over in an --out that contains a run.")] = False,
) -> None:
    """Train a causal language model on text, over local ranks, with ZeRO."""
    # Import late, so that `windlass train --help` does not wait for torch.
    from windlass.cli.training.train_options import TrainOptions

    options = TrainOptions(
        out=out,
        config=config,
        model=model,
        data=[*(data or []), *(paths or [])] or None,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        text_field=text_field,
        nproc=nproc,
        pp=pp,
        tp=tp,
        sp=sp,
        ep=ep,
        steps=steps,
        seq_len=seq_len,
        lr=lr,
        eval_every=eval_every,
        eval_bytes=eval_bytes,
        save_every=save_every,
        seed=seed,
        prompt=prompt,
        sample_tokens=sample_tokens,
        trust_remote_code=trust_remote_code,
        resume=resume,
        overwrite=overwrite,
    )
    code = run_training(options)
    if code:
        raise typer.Exit(code)


def run_training(options: TrainOptions) -> int:
    """Plan the run, start the ranks, and report the result.

    Returns:
        Exit code: 0, or 128 plus the number of the signal that stopped the run.

    Raises:
        WindlassError: an option is wrong, or a rank failed.
    """
    from windlass.cli.training.train_options import make_training_plan

    with _signals_raise_exit():
        plan = make_training_plan(options)
        if options.overwrite:
            _remove_earlier_run(plan)
        plan.result_file.unlink(missing_ok=True)
    # Use another folder than --out, because a full disk there is one of the failures to report.
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
        failure = Path(folder, "failure")
        outcome = _launch_ranks(plan, failure)
        message = read_failure(failure)
        stopped = stopped_marker_path(failure).exists()
    message = _describe_killed_rank(outcome) or message
    if message is not None:
        raise TrainingRunError(message)
    signalled = outcome.stopped_by is not None
    if stopped or (signalled and not plan.result_file.exists()):
        print_escaped(_resume_hint(plan, stopped), to_stderr=True)
        return outcome.exit_code if signalled else INTERRUPTED_EXIT_CODE
    if outcome.exit_code and not signalled:
        raise TrainingRunError(
            f"a rank ended with exit code {outcome.exit_code} and no message; see the output above, --debug shows more"
        )
    _print_result(plan)
    return 0


@contextmanager
def _signals_raise_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that `finally` blocks remove half-written files, as after Ctrl-C."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    taken = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _launch_ranks(plan: TrainingPlan, failure: Path) -> LaunchExitStatus:
    from windlass.launch.exit_status import LaunchExitStatus
    from windlass.launch.source_path import source_pythonpath
    from windlass.launch.start_ranks import start_ranks

    try:
        # -P: modules in the working directory, where other users may write, must not replace those of Python
        path = {"PYTHONPATH": source_pythonpath(os.environ.get("PYTHONPATH", ""))}
        return start_ranks(["-P", "-m", _WORKER_MODULE, str(plan.plan_file), str(failure)], plan.nproc, env=path)
    except KeyboardInterrupt:  # before the launcher has installed its signal handlers
        return LaunchExitStatus(INTERRUPTED_EXIT_CODE, interrupted_by=signal.SIGINT)


def _describe_killed_rank(status: LaunchExitStatus) -> str | None:
    """Describe the rank that was killed or crashed, if any. The other ranks fail because they lost this peer."""
    for failure in status.failures:
        if -failure.status == signal.SIGKILL:
            return str(failure)
        if failure.status < 0 and -failure.status not in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            return f"{failure}, a crash outside of Python; see the output above"
    return None


def _resume_hint(plan: TrainingPlan, stopped: bool) -> str:
    command = f"windlass train --resume --out {plan.out}"
    if stopped:
        return f"stopped; continue with: {command}"
    if (plan.checkpoint_folder / "latest").exists():
        return f"stopped before this step was saved; continue from the last checkpoint with: {command}"
    return "stopped before anything was trained; nothing was saved"


def _remove_earlier_run(plan: TrainingPlan) -> None:
    """Remove the files of an earlier run, so that none is mistaken for a file of this run."""
    for folder in (plan.checkpoint_folder, plan.export_folder, plan.tensorboard_folder):
        if folder.exists():
            shutil.rmtree(folder)
    for file in (plan.metrics_file, plan.loss_plot, plan.record_file):
        file.unlink(missing_ok=True)


def _print_result(plan: TrainingPlan) -> None:
    result = json.loads(plan.result_file.read_text())
    if result["sample"]:
        print_escaped(f"\nsample, after {result['prompt']!r}:\n{result['sample']}\n")
    print_escaped(f"held-out bits per byte {result['bits_before']:.2f} -> {result['bits_after']:.2f}")
    print_escaped(f"checkpoint      {result['checkpoint']}")
    if result["picture"]:
        print_escaped(f"loss curve      {result['picture']}")
    print_escaped(f"exported model  {result['exported']}")
