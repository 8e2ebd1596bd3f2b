"""Dispatch of optimizer updates to native code or to the PyTorch reference."""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch

from windlass.base.errors import ConfigError, ModelError
from windlass.base.log import logger
from windlass.kernels import reference
from windlass.kernels.page_sums import PageSums
from windlass.kernels.update_rules import UpdateRule
from windlass.kernels.update_tensors import UpdateTensors

NATIVE_RULES = ("Adam", "AdamW", "Lion", "Adagrad", "SGD", "LAMB")
REFERENCE_PATH = "reference"
_ENVIRONMENT_VARIABLE = "WINDLASS_KERNELS"
_FORMAT_CODES: dict[torch.dtype | None, int] = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.uint8: 3,
    None: 4,
}


@dataclass(frozen=True)
class KernelPath:
    """Implementation that computes updates.

    Args:
        name: an instruction set of the native module ("AVX-512", "AVX2", "NEON", "baseline"), or "reference".
        reason: reason for the choice, in one clause.
    """

    name: str
    reason: str

    @property
    def is_native(self) -> bool:
        return self.name != REFERENCE_PATH

    def __str__(self) -> str:
        return f"{'native ' if self.is_native else ''}{self.name} ({self.reason})"


def get_active_kernel_path() -> KernelPath:
    """Return the path that `apply_updates` takes. `WINDLASS_KERNELS` may name one (reference, baseline, AVX2, ...).

    Raises:
        ConfigError: the named path is not available.
    """
    return _resolve_path(os.environ.get(_ENVIRONMENT_VARIABLE, ""))


def list_kernel_paths() -> list[str]:
    """Return every path that can run here, the reference last."""
    return [*_instruction_sets(), REFERENCE_PATH]


def check_path_name(name: str, available: Sequence[str], missing: str = "") -> None:
    """Raise a ConfigError if a kernel path is not one of those that can run here.

    Args:
        missing: reason for which no native code can run; empty: it can run, or the reason is unknown.
    """
    if name in available:
        return
    reason = f" ({missing})" if missing else ""
    raise ConfigError(f"there is no kernel path {name!r} on this machine{reason}; use one of {', '.join(available)}")


def why_native_is_missing() -> str:
    """Return the reason for which no native code can run; empty: it can run."""
    module, why = _native_module()
    return "" if module is not None else why


def apply_updates(
    rule: UpdateRule,
    updates: Iterable[UpdateTensors],
    divisor: float = 1.0,
    *,
    path: str | None = None,
    threads: int | None = None,
    page_sums: Sequence[PageSums] = (),
) -> None:
    """Apply `rule` to every update in one pass over memory (LAMB: two): unscale, update, write the 16-bit copy.

    Args:
        divisor: gradients are divided by it (loss scale over clip coefficient).
        path: one of `list_kernel_paths()` in place of the active one.
        threads: threads of the native code; by default torch's number.
        page_sums: memory with checksums that contains tensors of the updates. Native code compares each page before an
            update changes it, and renews its checksum afterwards. The reference ignores them.

    Raises:
        ConfigError: `path`, or the path that `WINDLASS_KERNELS` names, cannot run here.
        ModelError: tensors do not match, have no memory, or overlap. The message names them.
    """
    if path is not None:
        check_path_name(path, list_kernel_paths(), why_native_is_missing())
    groups: dict[tuple[torch.dtype | None, ...], list[UpdateTensors]] = defaultdict(list)
    for piece in updates:
        piece.check(len(rule.signed_states))
        if piece.parameter.numel():
            groups[piece.dtypes].append(piece)
    if path is None:
        path = get_active_kernel_path().name
        _log_path_once(path)
    for formats, group in groups.items():
        if path == REFERENCE_PATH:
            for piece in group:
                reference.update_with_reference(rule, piece, divisor)
        else:
            _run_native(rule, formats, group, divisor, path, threads or torch.get_num_threads(), page_sums)


def can_sum_pages() -> bool:
    """Return True if the active path compares and renews checksums of pages."""
    return get_active_kernel_path().is_native


def compare_pages(page_sums: PageSums) -> None:
    """Compare each page with its checksum, unless it was compared before.

    Raises:
        ConfigError: there is no native code; see `can_sum_pages`.
    """
    module, why = _native_module()
    if module is None:
        raise ConfigError(f"no checksums can be compared: {why}")
    module.compare_pages(page_sums.addresses)


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Request huge pages for a host tensor of at least 4 MiB that is not written yet. No effect without native code."""
    module, _ = _native_module()
    if module is not None and tensor.nbytes >= 4 << 20:
        module.prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)


def _run_native(
    rule: UpdateRule,
    formats: tuple[torch.dtype | None, ...],
    updates: list[UpdateTensors],
    divisor: float,
    path: str,
    threads: int,
    page_sums: Sequence[PageSums],
) -> None:
    module, _ = _native_module()
    assert module is not None  # a native path is available only with the module
    try:
        module.update(
            path,
            rule.kernel_code,
            rule.flags,
            rule.coefficients,
            tuple(_FORMAT_CODES[dtype] for dtype in formats),
            [_tensor_addresses(piece) for piece in updates],
            -divisor if rule.maximize else divisor,
            rule.seed & 0xFFFFFFFF,
            threads,
            [sums.addresses for sums in page_sums],
        )
    except ValueError as error:  # raised before anything was changed
        raise ModelError(f"nothing was updated: {error}") from error


def _tensor_addresses(tensors: UpdateTensors) -> tuple[int, ...]:
    states = [state.data_ptr() for state in tensors.states]
    scales = [scale.data_ptr() for scale in tensors.scales]
    return (
        tensors.parameter.numel(),
        tensors.parameter.data_ptr(),
        tensors.gradient.data_ptr(),
        0 if tensors.low_precision_copy is None else tensors.low_precision_copy.data_ptr(),
        *(states + [0] * (3 - len(states))),
        *(scales + [0] * (3 - len(scales))),
    )


@lru_cache(maxsize=1)
def _native_module() -> tuple[ModuleType | None, str]:
    try:
        module = importlib.import_module("windlass.kernels._optimizers")
    except ModuleNotFoundError:
        return None, (
            "native code was not built when windlass was installed: install a C++20 compiler, then reinstall windlass"
        )
    except ImportError as error:
        return None, f"the native module does not load: {error}"
    return module, "the fastest on this processor"


def _instruction_sets() -> list[str]:
    module, _ = _native_module()
    return list(module.instruction_sets()) if module is not None else []


@lru_cache(maxsize=8)
def _resolve_path(wanted: str) -> KernelPath:
    names = _instruction_sets()
    if not wanted:
        return KernelPath(names[0] if names else REFERENCE_PATH, _native_module()[1])
    found = {name.lower(): name for name in [*names, REFERENCE_PATH]}.get(wanted.lower())
    if found is None:
        raise ConfigError(
            f"{_ENVIRONMENT_VARIABLE} is {wanted!r}; on this machine it can be {', '.join(list_kernel_paths())}, or "
            "unset"
        )
    return KernelPath(found, f"requested by {_ENVIRONMENT_VARIABLE}")


@lru_cache(maxsize=8)
def _log_path_once(name: str) -> None:
    logger.info("optimizer kernels: %s", get_active_kernel_path())
