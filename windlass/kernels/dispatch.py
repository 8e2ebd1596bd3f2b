"""Which path an optimizer update takes, native code or the reference in PyTorch, and why; then takes it."""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.kernels import reference
from windlass.kernels.piece import Piece
from windlass.kernels.rules import Rule

KERNELS = ("Adam", "AdamW", "Lion", "Adagrad", "SGD", "LAMB")
REFERENCE = "reference"
_VARIABLE = "WINDLASS_KERNELS"
_FORMATS: dict[torch.dtype | None, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.uint8: 3,
    None: 4,
}


@dataclass(frozen=True)
class Path:
    """How updates are computed here.

    Args:
        name: an instruction set of the native module ("AVX-512", "AVX2", "NEON", "baseline"), or "reference".
        why: one clause.
    """

    name: str
    why: str

    @property
    def native(self) -> bool:
        return self.name != REFERENCE

    def __str__(self) -> str:
        return f"{'native ' if self.native else ''}{self.name} ({self.why})"


def path_in_use() -> Path:
    """The path that `update` takes; `WINDLASS_KERNELS` may name one (reference, baseline, AVX2, ...).

    Raises:
        ConfigError: it names one that is not there.
    """
    return _path(os.environ.get(_VARIABLE, ""))


def paths() -> list[str]:
    """Every path that can run here, the reference last."""
    return [*_instruction_sets(), REFERENCE]


def update(
    rule: Rule,
    pieces: Iterable[Piece],
    divisor: float = 1.0,
    *,
    path: str | None = None,
    threads: int | None = None,
) -> None:
    """Apply `rule` to every piece in one pass over memory: unscale, update, write the 16-bit copy.

    Args:
        divisor: gradients are divided by it (loss scale over clip coefficient).
        path: one of `paths()` instead of the one in use.
        threads: of the native code; torch's own number by default.

    Raises:
        ModelError: tensors that do not fit together, have no memory, or share some; says which.
    """
    groups: dict[tuple[torch.dtype | None, ...], list[Piece]] = defaultdict(list)
    for piece in pieces:
        piece.check(len(rule.signed))
        if piece.parameter.numel():
            groups[piece.formats].append(piece)
    if path is None:
        path = path_in_use().name
        _say_once(path)
    for formats, alike in groups.items():
        if path == REFERENCE:
            for piece in alike:
                reference.update(rule, piece, divisor)
        else:
            _run_native(rule, formats, alike, divisor, path, threads or torch.get_num_threads())


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under a large tensor in host memory that was not written to yet; without effect elsewhere."""
    module, _ = _module()
    if module is not None and tensor.nbytes >= 4 << 20:
        module.prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)


def _run_native(
    rule: Rule,
    formats: tuple[torch.dtype | None, ...],
    pieces: list[Piece],
    divisor: float,
    path: str,
    threads: int,
) -> None:
    module, why = _module()
    if module is None:
        raise ConfigError(f"the native path {path} was asked for, and {why}")
    try:
        module.update(
            path,
            rule.code,
            rule.flags,
            rule.numbers,
            tuple(_FORMATS[dtype] for dtype in formats),
            [_addresses(piece) for piece in pieces],
            -divisor if rule.maximize else divisor,
            rule.seed & 0xFFFFFFFF,
            threads,
        )
    except ValueError as error:  # before anything was changed
        raise ModelError(f"nothing was updated: {error}") from error


def _addresses(piece: Piece) -> tuple[int, ...]:
    states = [state.data_ptr() for state in piece.states]
    scales = [scale.data_ptr() for scale in piece.scales]
    return (
        piece.parameter.numel(),
        piece.parameter.data_ptr(),
        piece.gradient.data_ptr(),
        0 if piece.lowered is None else piece.lowered.data_ptr(),
        *(states + [0] * (3 - len(states))),
        *(scales + [0] * (3 - len(scales))),
    )


@lru_cache(maxsize=1)
def _module() -> tuple[ModuleType | None, str]:
    try:
        module = importlib.import_module("windlass.kernels._optimizers")
    except ModuleNotFoundError:
        return None, "native code was not built when windlass was installed: install a C++20 compiler, then it again"
    except ImportError as error:
        return None, f"the native module does not load: {error}"
    return module, "the best that this processor has"


def _instruction_sets() -> list[str]:
    module, _ = _module()
    return list(module.instruction_sets()) if module is not None else []


@lru_cache(maxsize=8)
def _path(wanted: str) -> Path:
    names = _instruction_sets()
    if not wanted:
        return Path(names[0] if names else REFERENCE, _module()[1])
    found = {name.lower(): name for name in [*names, REFERENCE]}.get(wanted.lower())
    if found is None:
        raise ConfigError(f"{_VARIABLE} is {wanted!r}; on this machine it can be {', '.join(paths())}, or unset")
    return Path(found, f"asked for by {_VARIABLE}")


@lru_cache(maxsize=8)
def _say_once(name: str) -> None:
    logger.info("optimizer kernels: %s", path_in_use())
