"""Refusal to run Python code that lies in a model's directory or repository.

Every call that reads one passes `trust_remote_code`, False unless the user said otherwise: transformers asks on the
terminal where it is left out, and a pipe that says "y" would answer for the user.
"""

from __future__ import annotations


def needs_remote_code(error: BaseException) -> bool:
    """Tell whether transformers refused to read a directory because that needs its code."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def remote_code_refusal(name: object) -> str:
    """Say that `name` needs its own code, and how the user allows that."""
    return (
        f"{name} brings Python code of its own, which is not run; read it, and if you trust it pass "
        "--trust-remote-code (in Python trust_remote_code=True)"
    )
