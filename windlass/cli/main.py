"""Entry point of the `windlass` command: the table of commands, and the printing of errors (traceback with
`--debug`)."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import windlass
from windlass.base.broken_pipe import exit_quietly_on_broken_pipe
from windlass.base.errors import WindlassError
from windlass.base.processes import SignalInterrupt, exit_on_interrupted_import, forbid_world_writable_files
from windlass.base.text import print_escaped
from windlass.cli.expected_errors import describe_expected_error


@dataclass(frozen=True)
class CliCommand:
    """Entry of the command table. The command's module is imported only when the command is called."""

    name: str
    module: str
    attribute: str
    summary: str
    takes_program: bool = False  # all arguments after the program's name belong to the program
    passes_unknown_options: bool = False  # options unknown to the command belong to the script that it runs
    parses_itself: bool = False  # the command's function parses all arguments, `--help` included

    def load(self) -> Any:
        """Import the command (or group of commands) and return it."""
        found = getattr(importlib.import_module(self.module), self.attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = {
            "allow_interspersed_args": not self.takes_program,
            "ignore_unknown_options": self.passes_unknown_options or self.parses_itself,
        }
        alone.command(self.name, context_settings=settings, add_help_option=not self.parses_itself)(found)
        return typer.main.get_command(alone)


COMMANDS = (
    CliCommand(
        *("run", "windlass.cli.run", "run", "Start a script on N ranks, here or on several hosts."),
        takes_program=True,
        parses_itself=True,
    ),
    CliCommand("train", "windlass.cli.train", "train", "Train a causal language model on text, with ZeRO."),
    CliCommand("generate", "windlass.cli.generate", "generate", "Continue a text with a trained model."),
    CliCommand("serve", "windlass.cli.serve", "serve", "Serve a model over HTTP with OpenAI's interface."),
    CliCommand("chat", "windlass.cli.chat", "chat", "Talk with a model in the terminal."),
    CliCommand("compress", "windlass.cli.compress", "compress", "Write a model with packed weights."),
    CliCommand("merge", "windlass.cli.merge", "merge", "Merge models of one architecture into one."),
    CliCommand("export", "windlass.cli.export", "export", "Write a checkpoint's weights as Hugging Face safetensors."),
    CliCommand("checkpoints", "windlass.cli.checkpoints", "checkpoints", "List the checkpoints in a directory."),
    CliCommand("check", "windlass.cli.check", "check", "Print problems and resolved values of a configuration."),
    CliCommand("plan", "windlass.cli.plan", "plan", "Predict the memory of a run before it starts."),
    CliCommand("simulate", "windlass.cli.simulate", "simulate", "Predict the time of a step on a cluster."),
    CliCommand(
        "tune",
        "windlass.cli.tune",
        "tune",
        "Search for the fastest configuration of a script.",
        takes_program=True,
    ),
    CliCommand(
        "verify",
        "windlass.cli.verify",
        "verify",
        "Check that a sharded run equals a plain one.",
        passes_unknown_options=True,
    ),
    CliCommand(
        "profile",
        "windlass.cli.profile",
        "profile",
        "Record steps of a script as a trace of all ranks.",
        passes_unknown_options=True,
    ),
    CliCommand("report", "windlass.cli.report", "report", "Write a page of a run, alone or beside another one."),
    CliCommand(
        "bench",
        "windlass.cli.bench",
        "bench_app",
        "Measure training, transports, disks, the device and servers.",
    ),
    CliCommand("env", "windlass.cli.env", "env", "Print the facts of this machine for a bug report."),
)
_COMMAND_BY_NAME = {entry.name: entry for entry in COMMANDS}


class _LazyCommandGroup(TyperGroup):
    """Command group that imports a command's module when the command is called. `windlass --help` is then fast, and a
    missing extra breaks only the commands that need it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for entry in COMMANDS:
            self.commands[entry.name] = TyperCommand(entry.name, help=entry.summary, rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _COMMAND_BY_NAME and not ctx.resilient_parsing:
            entry = _COMMAND_BY_NAME[name]
            command = entry.load()
            if not entry.takes_program:
                rest = _strip_debug_flag(command, rest)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SignalInterrupt as error:  # typer would exit with 130, as after every KeyboardInterrupt
            raise typer.Exit(128 + error.number) from error


app = typer.Typer(
    cls=_LazyCommandGroup,
    name="windlass",
    help="Train, fine-tune and serve models bigger than their hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would read [a default] in a help text as markup
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(windlass.__version__)
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; also WINDLASS_DEBUG=1.")] = False,
) -> None:
    if debug:
        _enable_debug()


def _enable_debug() -> None:
    os.environ["WINDLASS_DEBUG"] = "1"  # an environment variable, because ranks inherit it


def _strip_debug_flag(command: Any, arguments: list[str]) -> list[str]:
    """Enable debugging if `--debug` is between a command and `--`. Return the arguments without this flag, or with
    it if the command has a `--debug` option too."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" not in arguments[:end]:
        return arguments
    _enable_debug()
    if any("--debug" in parameter.opts for parameter in command.params):
        return arguments
    return [argument for argument in arguments[:end] if argument != "--debug"] + arguments[end:]


@exit_quietly_on_broken_pipe()
def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    The exit code is that of the command (0 for success), 2 for wrong arguments, the code of an expected error (1 for
    most errors), or 128 plus the number of a signal that interrupted the command (130: Ctrl-C).
    """
    forbid_world_writable_files()
    try:
        with exit_on_interrupted_import():
            app(args=arguments, prog_name="windlass")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        message = describe_expected_error(error)
        if message is None or os.environ.get("WINDLASS_DEBUG", "0") not in ("", "0"):
            raise
        print_escaped(f"windlass: {message}", to_stderr=True)
        sys.exit(error.exit_code if isinstance(error, WindlassError) else 1)
