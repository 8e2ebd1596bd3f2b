"""`windlass train`: from a corpus and a configuration to a trained, measured, exported model."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.cli.training.failure import RunFailed, read_failure, stopped_marker
from windlass.cli.training.interrupt import EXIT_CODE

if TYPE_CHECKING:
    from windlass.cli.training.plan import Plan
    from windlass.cli.training.settings import Options

_WORKER = "windlass.cli.train_worker"


def train(
    paths: Annotated[list[str] | None, typer.Argument(help="More data, as --data takes it.")] = None,
    config: Annotated[str | None, typer.Option(help="ds_config.json; without one ZeRO stage 2 with AdamW.")] = None,
    model: Annotated[
        str | None, typer.Option(help="'tiny', a Hugging Face config.json or directory, or hub:NAME.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="File, directory, glob, 'stdlib' (this Python's sources) or hub:NAME[@CONFIG][:SPLIT]; repeatable."
        ),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer directory; without one a BPE is learned.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of the BPE that is learned. [4096]")] = None,
    text_field: Annotated[
        str | None, typer.Option(help="Field of JSON and Parquet records that holds the text. [text]")
    ] = None,
    nproc: Annotated[int | None, typer.Option(help="Ranks on this machine. [1]")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, those before a resume included.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    lr: Annotated[
        float | None, typer.Option(help='Learning rate where the configuration says "auto" or nothing.')
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between held-out measurements. [a quarter of --steps]")
    ] = None,
    eval_bytes: Annotated[int | None, typer.Option(help="Text to hold out, in bytes. [131072]")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: only at the end. [0]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of initial weights, data order and sample. [0]")] = None,
    prompt: Annotated[str | None, typer.Option(help="What the sample at the end continues. [a held-out text]")] = None,
    sample_tokens: Annotated[int | None, typer.Option(help="Length of that sample; 0: none. [120]")] = None,
    out: Annotated[Path, typer.Option(help="Folder of everything that the run leaves.")] = Path("windlass-run"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, at its exact step and sample.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in an --out that holds a run.")] = False,
) -> None:
    """Train a causal language model on text, over local ranks, with ZeRO."""
    # Imported late, so that `windlass --help` does not wait for torch.
    from windlass.cli.training.settings import Options

    options = Options(
        out=out,
        config=config,
        model=model,
        data=[*(data or []), *(paths or [])] or None,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        text_field=text_field,
        nproc=nproc,
        steps=steps,
        seq_len=seq_len,
        lr=lr,
        eval_every=eval_every,
        eval_bytes=eval_bytes,
        save_every=save_every,
        seed=seed,
        prompt=prompt,
        sample_tokens=sample_tokens,
        resume=resume,
        overwrite=overwrite,
    )
    code = run(options)
    if code:
        raise typer.Exit(code)


def run(options: Options) -> int:
    """Plans, starts the ranks, and reports what came of it: 0, or 130 if the run was stopped.

    Raises:
        WindlassError: whatever is wrong with the options, or ended a rank.
    """
    from windlass.cli.training.settings import make_plan

    plan = make_plan(options)
    if options.overwrite:
        _clear(plan)
    plan.result.unlink(missing_ok=True)
    # Not in --out: a full disk there is one of the failures to be told.
    with tempfile.TemporaryDirectory(prefix="windlass-") as folder:
        failure = Path(folder, "failure")
        code = _launch(plan, failure)
        message = read_failure(failure)
        stopped = stopped_marker(failure).exists()
    if message is not None:
        raise RunFailed(message)
    if stopped:
        typer.echo(f"stopped; go on with: windlass train --resume --out {plan.out}", err=True)
        return EXIT_CODE
    if code:
        raise RunFailed(f"a rank ended with exit code {code} and no word; see the output above, --debug shows more")
    _print_result(plan)
    return 0


def _launch(plan: Plan, failure: Path) -> int:
    from windlass.launch.run import launch

    try:
        return launch(["-m", _WORKER, str(plan.path), str(failure)], nproc=plan.nproc)
    except KeyboardInterrupt:
        return EXIT_CODE


def _clear(plan: Plan) -> None:
    """Takes away what an earlier run left, so that nothing of it can pass for this run's."""
    for folder in (plan.checkpoints, plan.exported, plan.events):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (plan.metrics, plan.picture):
        file.unlink(missing_ok=True)


def _print_result(plan: Plan) -> None:
    result = json.loads(plan.result.read_text())
    out = sys.stdout
    if result["sample"]:
        print(f"\nsample, after {result['prompt']!r}:\n{result['sample']}\n", file=out)
    print(f"held-out bits per byte {result['bits_before']:.2f} -> {result['bits_after']:.2f}", file=out)
    print(f"checkpoint      {result['checkpoint']}", file=out)
    if result["picture"]:
        print(f"loss curve      {result['picture']}", file=out)
    print(f"exported model  {result['exported']}", file=out)
