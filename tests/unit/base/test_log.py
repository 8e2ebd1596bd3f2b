"""Tests of logging: which ranks log at which level, and the error for an unknown level."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from windlass.base import log
from windlass.base.errors import ConfigError


@pytest.fixture(autouse=True)
def _level_stays() -> Iterator[None]:
    before = log.logger.level
    yield
    log.logger.setLevel(before)


@pytest.mark.parametrize("name", ["loud", "10", "warn ing"])
def test_unknown_level_error_lists_the_levels(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"log_level = '{name}' is not a log level.*DEBUG, INFO, WARNING, ERROR, CRITICAL"
    ):
        log.set_log_level(name, "log_level")


def test_unknown_level_in_the_environment_is_refused() -> None:
    command = [sys.executable, "-c", "import windlass.base.log"]
    done = subprocess.run(command, env={**os.environ, "WINDLASS_LOG_LEVEL": "loud"}, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "windlass.base.errors.ConfigError: WINDLASS_LOG_LEVEL = 'loud' is not a log level; write one of"
    )


def test_environment_level_overrides_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_LOG_LEVEL", raising=False)
    log.set_config_log_level("error")
    assert log.logger.level == logging.ERROR
    log.set_config_log_level(None)
    assert log.logger.level == logging.ERROR
    monkeypatch.setenv("WINDLASS_LOG_LEVEL", "DEBUG")
    log.set_config_log_level("critical")
    assert log.logger.level == logging.ERROR


@pytest.mark.parametrize(("rank", "level", "printed"), [
    ("0", logging.INFO, "windlass: hello 7\n"),
    ("3", logging.INFO, ""),
    ("3", logging.WARNING, ""),
    ("3", logging.ERROR, "windlass: [rank 3] hello 7\n"),
])  # fmt: skip
def test_other_ranks_log_errors_only(
    rank: str, level: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    (handler,) = [item for item in log.logger.handlers if type(item) is logging.StreamHandler]
    monkeypatch.setattr(handler, "stream", sys.stderr)
    log.set_log_level("INFO", "a test")
    log.logger.log(level, "hello %d", 7)
    assert capsys.readouterr().err == printed
