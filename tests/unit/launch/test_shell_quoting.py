"""Tests with real shells that quoted text survives a shell unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.compat.tables import file_names
from windlass.launch import exported_environment as exported_environment_module
from windlass.launch.exported_environment import EXPORTED_PREFIXES, exported_environment, parse_environment_file
from windlass.launch.launch_errors import LaunchError
from windlass.launch.shell_quoting import check_variable_name, shell_command
from windlass.launch.ssh_connection import SshConnectionOptions

HOSTILE = [
    *("a b", "'", '"', "''", "$HOME", "${x", "$(id)", "`id`", ";", "&", "|", ">x", "a\nb", "\n", "\\", "\\n", "\\'"),
    *(
        "é☃\U0001f40d",
        "",
        "*",
        "?",
        "[a]",
        "{a,b}",
        "-x",
        "--",
        "!x",
        "!!",
        "%n",
        "%%",
        "#",
        "~",
        "a=b",
        "\t",
        "\r",
        "\x01",
    ),
]
# Words of a shell are bytes without NUL. Python represents non-UTF-8 bytes as lone surrogates and passes them on.
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20) | st.sampled_from(HOSTILE)
_TELLS = ["sh", "-c", """printf '%s\\0' "$HOSTILE" "$(pwd)" "$@" """, "sh"]
SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh", "ksh") if shutil.which(shell)]


def through(shell: str, text: str) -> list[str]:
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run([shell, "-c", text], capture_output=True, check=True, env=environment, cwd="/")
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=25)
@given(st.lists(WORDS, max_size=8), WORDS)
def test_words_and_variables_round_trip_through_a_shell(words: list[str], value: str) -> None:
    text = shell_command([*_TELLS, *words], env={"HOSTILE": value}, cwd="/tmp")
    assert through("sh", text) == [value, "/tmp", *words]
    # As with ssh: the user's shell parses text that starts another shell.
    assert through("sh", shell_command(["sh", "-c", text])) == [value, "/tmp", *words]


@pytest.mark.parametrize("shell", SHELLS)
def test_hostile_words_round_trip_through_every_shell(shell: str, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "a" $HOME;\n\\'
    folder.mkdir()
    text = shell_command([*_TELLS, *HOSTILE], env={"HOSTILE": "".join(HOSTILE)}, cwd=str(folder))
    assert through(shell, text) == ["".join(HOSTILE), str(folder), *HOSTILE]


def test_nul_and_invalid_names_are_refused() -> None:
    with pytest.raises(LaunchError, match="contains a NUL"):
        shell_command(["a\0b"])
    for name in ("", "1a", "a-b", "a b", "a;id", "$x", "a\n"):
        with pytest.raises(LaunchError, match="is not a variable name"):
            check_variable_name(name)


def test_ssh_command() -> None:
    result = SshConnectionOptions(2222, ("-F", "config")).ssh_argv("node-1", "TEXT")
    assert result == [
        *("ssh", "-F", "config", "-p", "2222", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
        *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=5", "-o", "ControlMaster=no"),
        *("-o", "ControlPath=none", "-o", "ForwardX11=no", "-o", "ClearAllForwardings=yes", "--", "node-1", "TEXT"),
    ]
    with pytest.raises(LaunchError, match="is not a host name"):
        SshConnectionOptions().ssh_argv("-oProxyCommand=id", "TEXT")


def test_ssh_command_omits_the_environment_and_starts_the_agent(tmp_path: Path) -> None:
    """The ssh command holds no secrets: the environment follows as a message.

    The script that is sourced first may have any name, and does not stop the agent.
    """
    script = tmp_path / "it's mine.sh"
    script.write_text("HOSTILE='by the script'; export HOSTILE\n")
    text = SshConnectionOptions(venv_script=str(script)).agent_shell_command(
        {"PYTHONPATH": "/a b", "WANDB_API_KEY": "secret"}, "/"
    )
    assert "secret" not in text
    assert text.startswith("exec sh -c ")
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "python").write_text('#!/bin/sh\nprintf "%s|" "$HOSTILE" "$PYTHONPATH" "$@"\n')
    (fake / "python").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", text.replace(sys.executable, str(fake / "python"))], capture_output=True, text=True, check=True
    )
    source = str(Path(__file__).parents[3])
    assert done.stdout in (
        f"by the script|/a b:{source}|-u|-m|windlass.launch.node_agent|",
        "by the script|/a b|-u|-m|windlass.launch.node_agent|",  # windlass is installed
    )


def test_forwarded_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / ".deepspeed_env").write_text("A=of home\nB=of home\n")
    (here / ".deepspeed_env").write_text("B=of here\n")
    environ = {
        **{"HOME": str(home), "PATH": "/bin", "SECRET": "x", "RANK": "0", "PYTHONPATH": "/p", "PYTHONHASHSEED": "0"},
        **{"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "UCX_TLS": "tcp", "MLFLOW_X": "1", "MV2_X": "2"},
        **{"WINDLASS_RESTARTS": "1", "WINDLASS_LOG_LEVEL": "ERROR"},
    }
    result = exported_environment(environ, str(here))
    assert result == {
        **{"PYTHONPATH": f"{here}:/p", "PYTHONHASHSEED": "0", "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5"},
        **{"UCX_TLS": "tcp", "MLFLOW_X": "1", "MV2_X": "2", "WINDLASS_LOG_LEVEL": "ERROR"},
        **{"A": "of home", "B": "of here"},
    }
    assert "NCCL_IB_HCA" not in exported_environment({**environ, "AISC_JOB_NAME": "x"}, str(here))
    (here / "other").write_text("C=3\n")
    renamed = exported_environment({**environ, "DS_ENV_FILE": "other"}, str(here))
    assert renamed["C"] == "3" and "A" not in renamed
    # GPT-NeoX appends the names of its own variables to `deepspeed.launcher.runner.EXPORT_ENVS`.
    monkeypatch.setattr(exported_environment_module, "EXPORTED_PREFIXES", list(EXPORTED_PREFIXES))
    name = "deepspeed.launcher.runner.EXPORT_ENVS"
    file_names.TABLE[name].resolve(name).append("SECRET")
    assert exported_environment(environ, str(here))["SECRET"] == "x"


def test_environment_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_bytes(b"A=\xff\n")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env is not UTF-8 text"):
        exported_environment({"HOME": str(tmp_path)}, str(tmp_path))


def test_lines_of_an_environment_file() -> None:
    text = "A=1\n\n# no\nexport B=x=y\nC=\nD='a b'\n E = \"q\" \nF=it's\n"
    assert parse_environment_file(text, "f") == {"A": "1", "B": "x=y", "C": "", "D": "a b", "E": "q", "F": "it's"}
    with pytest.raises(LaunchError, match=r"^f, line 2: 'novalue' has no '='; write KEY=VALUE$"):
        parse_environment_file("A=1\nnovalue\n", "f")
    with pytest.raises(LaunchError, match=r"^f, line 1: 'A B' is not a variable name"):
        parse_environment_file("A B=1", "f")
