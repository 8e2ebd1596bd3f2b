"""transformers' own `from_pretrained`, made to read only this rank's bytes while a model is being built sharded.

transformers builds the model on the meta device and then fills it from the files, tensor by tensor, through
`setattr` on the modules. Here the files are read as promises (born_deferred.py) instead, so that what is set on a
module is cut without ever being whole. Its path for DeepSpeed's ZeRO-3, which reads every file on every rank, is not
taken.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from windlass.base.errors import CheckpointError, ConfigError
from windlass.base.log import logger
from windlass.zero.sharded_init.weight_files import deferred_from_files

MODULE = "transformers.modeling_utils"
DETECTION = "is_deepspeed_zero3_enabled"  # asked by from_config and from_pretrained
LOADER = "_load_pretrained_model"  # of PreTrainedModel, static: (model, state_dict, checkpoint_files, load_config, ...)
MISSING = "_move_missing_keys_from_meta_to_device"  # of PreTrainedModel: (missing_keys, ...)


class FromPretrainedPatch:
    """The names of transformers that are replaced while a model is being built; undone by `undo`.

    Args:
        computes: this rank converts tensors that must be whole for that.
    """

    def __init__(self, *, computes: bool) -> None:
        self._computes = computes
        self._before: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the names if transformers is there, once.

        transformers 4 has no MISSING. Its models can be built; `from_pretrained` inside the context is refused.

        Raises:
            ConfigError: this transformers has neither name by which loading could be seen.
        """
        module = sys.modules.get(MODULE)
        if self._before or module is None or not hasattr(module, "PreTrainedModel"):
            return  # absent, or still being imported
        model = module.PreTrainedModel
        absent = [] if LOADER in vars(model) else [f"PreTrainedModel.{LOADER}"]
        absent += [] if DETECTION in vars(module) else [f"{MODULE}.{DETECTION}"]
        if absent:
            raise ConfigError(
                f"this transformers has no {' and no '.join(absent)}, which windlass.zero.Init replaces; install the "
                "transformers that docs/construction.md names"
            )
        held = [(module, DETECTION), (model, LOADER), (model, MISSING)]
        self._before = [(holder, name, vars(holder)[name]) for holder, name in held if name in vars(holder)]
        if MISSING not in vars(model):
            self._refuse_loading()
            return
        original, originally_moved = getattr(model, LOADER), getattr(model, MISSING)

        def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any, **named: Any) -> Any:
            given = self._promised(state_dict, checkpoint_files, load_config)
            found = original(model, given, checkpoint_files, load_config, *more, **named)
            _refuse_mismatch(found[0] if isinstance(found, tuple) else found, load_config)  # 5.0: no tuple
            return found

        def move(model: Any, missing_keys: Any, *more: Any, **named: Any) -> Any:
            return originally_moved(model, _InOrder(missing_keys), *more, **named)

        setattr(module, DETECTION, lambda: False)
        setattr(model, MISSING, move)
        setattr(model, LOADER, staticmethod(load))

    def undo(self) -> None:
        """Put the names back."""
        for holder, name, value in self._before:
            setattr(holder, name, value)
        self._before = []

    def _refuse_loading(self) -> None:
        def refuse(*given: Any, **named: Any) -> Any:
            raise ConfigError(
                f"transformers {sys.modules['transformers'].__version__} has no PreTrainedModel.{MISSING}, which "
                "from_pretrained inside windlass.zero.Init needs; install transformers 5 or newer, or call "
                "from_pretrained outside of windlass.zero.Init"
            )

        for holder, name, _ in self._before:
            if name == DETECTION:
                setattr(holder, name, lambda: False)
            elif name == LOADER:
                setattr(holder, name, staticmethod(refuse))

    def _promised(self, state_dict: Any, files: Any, load_config: Any) -> Any:
        if getattr(load_config, "hf_quantizer", None) is not None:
            raise ConfigError(
                "a quantised model can't be built under windlass.zero.Init; load it outside, or unquantised"
            )
        if state_dict is not None or not files:
            return state_dict
        if not all(str(file).endswith(".safetensors") for file in files):
            logger.warning(f"{files[0]} is no safetensors file, so every rank reads all of it; save it as safetensors")
            return None
        return deferred_from_files([Path(file) for file in files], computes=self._computes)


class _InOrder(set[str]):
    """Keys that are missing. transformers makes parameters for them in the order of a set, which is another one in each
    process; the ranks must make them in one."""

    def __sub__(self, other: Any) -> Any:
        return sorted(name for name in self if name not in other)


def _refuse_mismatch(info: Any, load_config: Any) -> None:
    if info.mismatched_keys and not load_config.ignore_mismatched_sizes:
        name, have, want = sorted(info.mismatched_keys, key=lambda key: str(key[0]))[0]
        raise CheckpointError(
            f"{load_config.pretrained_model_name_or_path}: {name!r} has shape {tuple(have)} in the files and "
            f"{tuple(want)} in the model ({len(info.mismatched_keys)} such); pass the config that belongs to the files "
            "or ignore_mismatched_sizes=True to initialise them anew"
        )
