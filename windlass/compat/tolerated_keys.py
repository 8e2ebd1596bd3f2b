"""Removal or correction of configuration keys that DeepSpeed accepts but windlass rejects or interprets differently.

Changes are logged as warnings, with two exceptions: the removal of keys without effect on results, and the insertion of
DeepSpeed's default weight decay.

DeepSpeed ignores unknown top-level keys (trl sends dotted ones) and unknown keys in `aio`, `pipeline`, `autotuning`,
`flops_profiler`, `activation_checkpointing`, `eigenvalue`, `quantize_training`, `optimizer` and `scheduler`, except in
the `params` of the last two, which are arguments. In its other sections an unknown key is an error, as in windlass. If
two keys contradict each other, DeepSpeed ignores one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from windlass.base.log import logger
from windlass.config.compression_contradictions import PRUNING_METHODS
from windlass.config.config_loading import validate_config
from windlass.config.config_problems import ProblemKind

_LENIENT_SECTIONS = (
    "aio",
    "activation_checkpointing",
    "autotuning",
    "eigenvalue",
    "flops_profiler",
    "pipeline",
    "quantize_training",
)
_logged_paths: set[str] = set()


def resolve_tolerated_keys(source: Any) -> Any:
    """Return `source`, or a changed copy of its data.

    Raises:
        ConfigError: the source is unreadable.
    """
    found = validate_config(source)
    top = found.source.data
    unknown = [problem.path for problem in found.problems if problem.kind is ProblemKind.UNKNOWN]
    strange = [path for path in unknown if path in top or _is_ignored_key(path)]
    settled = [problem.path for problem in found.problems if problem.kind is ProblemKind.CONTRADICTION]
    settled = [path for path in settled if path in _RESOLVED_CONTRADICTIONS]
    idle = [key for key, is_idle in _IGNORED_KEYS.items() if key in top and is_idle(top[key])]
    decay, coupled = _implicit_weight_decay(top.get("optimizer")), _is_coupled_adamw(top.get("optimizer"))
    moot = (
        _meaningless_keys(top.get("zero_optimization"))
        | _unknown_warmup(top.get("scheduler"))
        | _unreached_profile(top.get("flops_profiler"))
    )
    if not (strange or settled or idle or coupled or moot) and decay is None:
        return source
    data = copy.deepcopy(top)
    if coupled:
        del data["optimizer"]["params"]["adam_w_mode"]
    if decay is not None:
        data["optimizer"]["params"] = {**(data["optimizer"].get("params") or {}), "weight_decay": decay}
    for path in [*strange, *idle, *moot]:
        _remove_key(data, path)
    for path in settled:
        _RESOLVED_CONTRADICTIONS[path][0](data)
    name = found.source.name
    if new := _not_logged_yet(strange):
        logger.warning("%s: ignored, because DeepSpeed has no such keys: %s", name, ", ".join(new))
    if coupled and _not_logged_yet(["optimizer.params.adam_w_mode"]):
        logger.warning("%s: optimizer.params.adam_w_mode: ignored, AdamW always decouples its decay; use Adam", name)
    for path in _not_logged_yet(settled):
        logger.warning("%s: %s: %s", name, path, _RESOLVED_CONTRADICTIONS[path][1])
    for path in _not_logged_yet(list(moot)):
        logger.warning("%s: %s: ignored, because %s", name, path, moot[path])
    return data


def _is_ignored_key(path: str) -> bool:
    section, _, name = path.partition(".")
    return section in _LENIENT_SECTIONS or (section in ("optimizer", "scheduler") and "." not in name)


def _meaningless_keys(section: Any) -> dict[str, str]:
    """Return the keys of `zero_optimization` whose values windlass ignores, with the reason."""
    if not isinstance(section, dict):
        return {}
    found = {
        name: "0 requests the smallest possible size, which is only slower; write a positive number"
        for name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
        if section.get(name) == 0 and section[name] is not False
    }
    # trl copies the trained model's config, with its offload section, for a model that only runs inference.
    if section.get("stage", 0) == 0:
        offload_section = section.get("offload_optimizer")
        asks = {
            "offload_optimizer": isinstance(offload_section, dict)
            and offload_section.get("device", "none") not in (None, "none"),
            "cpu_offload": section.get("cpu_offload"),
        }
        found |= {name: "stage 0 keeps all states on every rank" for name, asked in asks.items() if asked}
    return {f"zero_optimization.{name}": why for name, why in found.items()}


def _unknown_warmup(scheduler: Any) -> dict[str, str]:
    """Return the key of an unknown `warmup_type`, with the reason and DeepSpeed's fallback; empty if it is known."""
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    kind = params.get("warmup_type", "log") if isinstance(params, dict) else "log"
    if kind in ("log", "linear"):
        return {}
    return {"scheduler.params.warmup_type": f"{kind!r} is neither log nor linear; using log"}


def _unreached_profile(section: Any) -> dict[str, str]:
    """Return the keys of a profiler of a negative step, with the reason: DeepSpeed never profiles it."""
    step = section.get("profile_step") if isinstance(section, dict) else None
    if not isinstance(step, int) or step >= 0:
        return {}
    why = f"profile_step is {step}, so that no step is profiled; write the number of a step"
    return {f"flops_profiler.{name}": why for name in ("enabled", "profile_step") if name in section}


def _implicit_weight_decay(optimizer: Any) -> float | None:
    """Return DeepSpeed's default weight decay for Adam, if the key is missing and windlass's default differs.

    DeepSpeed's default is 0, except with `torch_adam`, where torch's AdamW uses 0.01.
    """
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("params") or {}, dict):
        return None
    params, name = optimizer.get("params") or {}, str(optimizer.get("type")).lower()
    if name not in ("adam", "adamw") or "weight_decay" in params:
        return None
    decouples = name == "adamw" or params.get("adam_w_mode", True)
    theirs = 0.01 if params.get("torch_adam") and decouples else 0.0
    return theirs if theirs != (0.01 if name == "adamw" else 0.0) else None


def _is_coupled_adamw(optimizer: Any) -> bool:
    """Return True if AdamW is configured with `adam_w_mode` False, which DeepSpeed ignores."""
    if not isinstance(optimizer, dict) or not isinstance(optimizer.get("params"), dict):
        return False
    return str(optimizer.get("type")).lower() == "adamw" and optimizer["params"].get("adam_w_mode") is False


def _not_logged_yet(paths: list[str]) -> list[str]:
    found = [path for path in paths if path not in _logged_paths]
    _logged_paths.update(found)
    return found


def _remove_key(data: dict[str, Any], path: str) -> None:
    if path in data:
        del data[path]
        return
    *sections, name = path.split(".")
    for section in sections:
        data = data[section]
    data.pop(name)


def _drop_offload_param(data: dict[str, Any]) -> None:
    for name in ("offload_param", "cpu_offload_param"):
        data["zero_optimization"].pop(name, None)


def _drop_predivide_factor(data: dict[str, Any]) -> None:
    del data["gradient_predivide_factor"]


def _use_scheduler_lr(data: dict[str, Any]) -> None:
    data["optimizer"]["params"]["lr"] = data["scheduler"]["params"]["warmup_max_lr"]


def _drop_technique(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["compression_training"].pop(name)


def _extend_total_steps(data: dict[str, Any]) -> None:
    params = data["scheduler"]["params"]
    params["total_num_steps"] = params["warmup_num_steps"]


_RESOLVED_CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "zero_optimization.offload_param": (
        _drop_offload_param,
        "ignored, because parameters are sharded, and can be offloaded, only at stage 3",
    ),
    "gradient_predivide_factor": (_drop_predivide_factor, "ignored, because prescale_gradients divides by all ranks"),
    "scheduler.params.warmup_max_lr": (
        _use_scheduler_lr,
        "differs from optimizer.params.lr: the schedule sets the learning rate",
    ),
    "scheduler.params.warmup_num_steps": (
        _extend_total_steps,
        "more than total_num_steps: the learning rate is 0 after the warm-up",
    ),
} | {
    f"compression_training.{name}.different_groups": (
        _drop_technique(name),
        f"empty, so that {name} compresses no module; the section is ignored",
    )
    for name in (*PRUNING_METHODS, "weight_quantization", "activation_quantization")
}
"""Contradictions that DeepSpeed resolves silently: the resolution, and the text of the warning."""

_IGNORED_KEYS: dict[str, Callable[[Any], bool]] = {
    "use_data_before_expert_parallelism": lambda value: True,  # changes only the placement of experts, not the results
    "sequence_parallel_size": lambda value: value == 1,
}
"""Top-level keys without effect on results, and the values for which this holds."""
