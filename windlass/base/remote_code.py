"""Refusal to run Python code from a model's directory or repository.

Every call that reads a model passes `trust_remote_code`, which is False unless the user set it. Without the argument
transformers prompts on the terminal, and a pipe that sends "y" would answer for the user.
"""

from __future__ import annotations


def needs_remote_code(error: BaseException) -> bool:
    """Return True if transformers refused to read a directory because its model needs the directory's Python code."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def remote_code_refusal(name: object) -> str:
    """Return the error message for a model `name` that needs its Python code, with the option that allows it."""
    return (
        f"{name} contains Python code, which is not run; read it, and if you trust it pass "
        "--trust-remote-code (in Python trust_remote_code=True)"
    )
