"""Teacher of a run with the section `distillation`: checked before the ranks start, loaded and attached on each."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import windlass
from windlass.base.atomic_file import make_directory, write_atomically
from windlass.base.bounded_json import parse_json
from windlass.base.errors import ConfigError
from windlass.comm.rank_group import world_group
from windlass.compress.distillation import PROJECTION, Distillation, check_tokenizers
from windlass.compress.packed_model import is_packed_directory
from windlass.compress.teacher_cache import TeacherCache
from windlass.config import Config, load_config
from windlass.data.tokenizer import load_tokenizer

_RECORD = "teacher_files.json"  # file in the folder of a cache, with the hashes of the teacher's files
_OWN_KEYS = ("teacher", "teacher_stage", "teacher_device", "cache", "cache_top_k")
_SHARED_SECTIONS = ("bf16", "fp16", "comm", "watchdog", "train_micro_batch_size_per_gpu")


def check_teacher(config: dict[str, Any], tokenizer: Path) -> None:
    """Check the teacher that a configuration names, without loading it.

    Raises:
        ConfigError: there is neither a teacher nor a cache, the teacher does not exist, or it has another tokenizer.
        DataError: the teacher has no tokenizer.
    """
    section = load_config(config).distillation
    if section.requested_key() is None:
        return
    if section.teacher is None and section.cache is None:
        raise ConfigError(
            "distillation.teacher is missing; write the directory of the teacher, or a complete distillation.cache"
        )
    if section.teacher is not None:
        if not Path(section.teacher, "config.json").is_file():
            raise ConfigError(
                f"distillation.teacher is {section.teacher!r}, which has no config.json; write the directory of a "
                "model, e.g. OUT/hf of another run"
            )
        own, other = load_tokenizer(tokenizer), load_tokenizer(Path(section.teacher))
        check_tokenizers(own.backend, other.backend)


def attach_teacher(model: nn.Module, config: Config, raw: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """Attach the teacher of a configuration to a model before `initialize`. Collective.

    Returns:
        The teacher's engine; None without a teacher, or if only a cache of its outputs is used.
    """
    section = config.distillation
    if section.requested_key() is None:
        return None
    engine = cache = None
    choose_attention: Any = getattr(model, "set_attn_implementation", None)
    if section.attention and choose_attention is not None:
        choose_attention("eager")  # other implementations return no attention maps
    if section.teacher is not None:
        engine = _load_engine(section, raw, trust_remote_code=trust_remote_code)
    if section.cache is not None:
        folder = Path(section.cache)
        make_directory(folder)
        cache = TeacherCache(
            folder,
            top_k=section.cache_top_k,
            temperature=section.temperature,
            teacher=_identity(Path(section.teacher), folder / _RECORD) if section.teacher is not None else None,
            rank=dist.get_rank(),
        )
    options = section.model_dump(exclude_unset=True)
    for key in _OWN_KEYS:
        options.pop(key, None)
    Distillation(engine, cache=cache, **options).attach(model)
    return engine


def without_projection(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without the projection that distillation attaches to the model."""
    return {name: value for name, value in state.items() if not name.startswith(f"{PROJECTION}.")}


def _load_engine(section: Any, raw: dict[str, Any], *, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    zero: dict[str, Any] = {"stage": section.teacher_stage}
    if section.teacher_device != "none":
        zero["offload_param"] = {"device": section.teacher_device}
    config = {key: raw[key] for key in _SHARED_SECTIONS if key in raw} | {"zero_optimization": zero}
    config.setdefault("train_micro_batch_size_per_gpu", 1)  # required in every configuration; evaluation ignores it
    options = {"attn_implementation": "eager"} if section.attention and not is_packed_directory(section.teacher) else {}
    teacher = windlass.from_pretrained(
        AutoModelForCausalLM, section.teacher, config=config, trust_remote_code=trust_remote_code, **options
    )
    teacher.config.use_cache = False
    return windlass.initialize(model=teacher, config=config)[0]


def _identity(folder: Path, record: Path) -> str:
    """Return a hash of a model's configuration and files of weights. Collective: each rank reads some of the files.

    Args:
        record: file with known hashes by path, each with the size and time of the last change of the file.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    known = _read_record(record)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    found = {str(path.resolve()): _hashed(path, known) for path in files[rank::ranks]}
    if ranks > 1:
        found = {path: entry for part in world_group().all_gather_object(found) for path, entry in part.items()}
    if (
        rank == 0
        and any(known.get(path) != entry for path, entry in found.items())
        and os.access(record.parent, os.W_OK)
    ):
        write_atomically(record, json.dumps({**known, **found}, indent=2) + "\n")
    identity = hashlib.sha256((folder / "config.json").read_bytes())
    for path in files:
        identity.update(f"{path.name} {found[str(path.resolve())][-1]}".encode())
    return identity.hexdigest()


def _read_record(record: Path) -> dict[str, Any]:
    try:
        found = parse_json(record.read_bytes())
    except (OSError, ValueError):  # without a readable record all files are hashed again
        return {}
    return found if isinstance(found, dict) else {}


def _hashed(path: Path, known: dict[str, Any]) -> list[Any]:
    """Return size, time of the last change and hash of a file. The file is read only if `known` has no entry with this
    size and time."""
    state = path.stat()
    entry = known.get(str(path.resolve()))
    if isinstance(entry, list) and entry[:2] == [state.st_size, state.st_mtime_ns] and len(entry) == 3:
        return entry
    with open(path, "rb") as file:
        return [state.st_size, state.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest()]
