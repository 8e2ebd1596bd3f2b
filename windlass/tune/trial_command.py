"""Command line of a trial: the user's own, with the path of the trial's configuration instead of the user's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.base.errors import ConfigError
from windlass.config.config_loading import validate_config
from windlass.config.config_overrides import canonical_path, is_section, override_keys, value_at_path
from windlass.config.config_problems import ProblemKind
from windlass.config.config_source import read_source

CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--config")
"""Options of programs that take the path of a ds_config.json, in search order."""


@dataclass(frozen=True)
class ProgramCommand:
    """Command of the user.

    Attributes:
        launcher: Words before the program: the launcher and its flags.
        program: The program and its arguments.
        config: Argument of the program that holds the configuration: a path, or base64; None: the program's arguments
            have none, and the program passes a configuration to `initialize`.
        argument_of_key: Option of the program by configuration key (`autotuning.arg_mappings`).
    """

    launcher: tuple[str, ...]
    program: tuple[str, ...]
    config: str | None = None
    argument_of_key: Mapping[str, str] = field(default_factory=dict)

    @property
    def config_name(self) -> str:
        """Name of the configuration in messages: its path, unless it is base64 or the program passes it."""
        return self.config if self.config is not None and os.path.exists(self.config) else "config"

    def for_trial(self, config_path: Path, config: Mapping[str, Any]) -> list[str]:
        """Return the command of a trial.

        Args:
            config_path: File with the trial's configuration.
            config: The same configuration as data, for the values of options in `argument_of_key`.
        """
        words = list(self.program)
        for index, word in enumerate(words):
            flag, equals, path = word.partition("=")
            if self._is_config(word) and index:
                words[index] = str(config_path)
            elif equals and flag.startswith("-") and self._is_config(path):
                words[index] = f"{flag}={config_path}"
        for key, option in self.argument_of_key.items():
            found = value_at_path(config, key)
            if found is not None and found != "auto":
                words = replace_option(words, option, str(found))
        return [*self.launcher, *words]

    def _is_config(self, word: str) -> bool:
        if self.config is None:
            return False
        if word == self.config:
            return True
        # The configuration may be base64, which is not a path.
        return os.path.exists(word) and os.path.exists(self.config) and os.path.samefile(word, self.config)


def find_config(program: Sequence[str]) -> str:
    """Return the path of the configuration in the arguments of a program.

    Raises:
        ConfigError: no option of `CONFIG_FLAGS` names an existing file.
    """
    missing = ""
    for flag in CONFIG_FLAGS:
        for index, word in enumerate(program):
            name, equals, value = word.partition("=")
            if name != flag:
                continue
            found = value if equals else program[index + 1] if index + 1 < len(program) else ""
            if found and Path(found).is_file():
                return found
            if found and not found.startswith("-"):  # --deepspeed may be a switch
                missing = missing or f"{flag} {found}"
    if missing:
        raise ConfigError(
            f"{missing} of the program names no existing file; give a path that exists, or use `windlass tune --config "
            "ds.json`"
        )
    raise ConfigError(
        f"the program has no configuration among its arguments ({', '.join(CONFIG_FLAGS)} FILE); pass one to it, or "
        "use `windlass tune --config ds.json`"
    )


def replace_option(words: Sequence[str], option: str, value: str) -> list[str]:
    """Return the words with the value of an option replaced, or with the option added at their end."""
    found = list(words)
    for index, word in enumerate(found):
        if word == option and index + 1 < len(found):
            found[index + 1] = value
            return found
        if word.startswith(f"{option}="):
            found[index] = f"{option}={value}"
            return found
    return [*found, option, value]


def mapped_options(given: Mapping[str, Any], raw: dict[str, Any], source: str) -> dict[str, str]:
    """Return options of the program by canonical configuration key.

    Args:
        given: Options by configuration key, in any spelling of the key.
        raw: The user's configuration.
        source: Name of the setting that has `given`, for errors.

    Raises:
        ConfigError: a key does not exist, is a section, or has two options; or a value is not an option.
    """
    found: dict[str, str] = {}
    for text, option in given.items():
        key = canonical_path(text.strip())  # DeepSpeed's own example has a key that ends with a space
        if not isinstance(option, str) or not option.startswith("-") or any(map(str.isspace, option)):
            raise ConfigError(
                f"{source}: {key} has {option!r}, which is not an option; write {key}: --OPTION of the script"
            )
        if is_section(key):
            raise ConfigError(f"{source}: {key} is a section, not a value; name a key inside of it")
        for problem in validate_config(override_keys(raw, {key: 0})).problems:
            is_inside = key.startswith(f"{problem.path}.")
            if problem.kind is ProblemKind.UNKNOWN and (is_inside or key == problem.path):
                raise ConfigError(f"{source}: {problem.path}: {problem.message}")
            if problem.kind is ProblemKind.TYPE and is_inside:
                raise ConfigError(
                    f"{source}: {key} does not exist: {problem.path} has no keys inside; name a key that exists"
                )
        if key in found:
            raise ConfigError(f"{source}: {key} has two options, {found[key]} and {option}; drop one")
        found[key] = option
    return found


def read_config(path: str) -> dict[str, Any]:
    """Return the data of a configuration file."""
    return read_source(path).data
