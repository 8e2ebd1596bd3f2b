"""Patch of transformers, so that `from_pretrained` inside `zero.Init` reads only the bytes of this rank's shards.

transformers constructs the model on the meta device and then fills it from the files, tensor by tensor, with `setattr`
on the modules. The patch gives transformers deferred tensors (deferred.py) in place of the files' tensors. Each becomes
a sharded parameter as soon as it is set on a module. Only tensors that transformers converts are read in full, by rank
0. The patch also disables the path of transformers for DeepSpeed's ZeRO-3, which reads every file on every rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from windlass.base.errors import CheckpointError, ConfigError
from windlass.base.log import logger
from windlass.zero.core.sharded_parameter import ShardedParameter
from windlass.zero.sharded_init.weight_files import deferred_from_files

MODULE = "transformers.modeling_utils"
DETECTION = "is_deepspeed_zero3_enabled"  # called by from_config and from_pretrained
# Static method of PreTrainedModel: (model, state_dict, checkpoint_files, load_config, ...).
LOADER = "_load_pretrained_model"
MISSING = "_move_missing_keys_from_meta_to_device"  # method of PreTrainedModel: (missing_keys, ...)
FIT_BIAS = "_adjust_bias"  # method of PreTrainedModel: (output_embeddings, input_embeddings)


class FromPretrainedPatch:
    """Replacement of functions of transformers while a model is constructed. `undo` restores them.

    Args:
        computes: True on rank 0, which reads tensors in full and converts them.
    """

    def __init__(self, *, computes: bool) -> None:
        self._computes = computes
        self._before: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the functions if transformers is imported and they are not replaced yet.

        transformers 4 has no `MISSING`. Its models can be constructed inside the context, but `from_pretrained` raises
        ConfigError.

        Raises:
            ConfigError: this version of transformers lacks `LOADER` or `DETECTION`.
        """
        module = sys.modules.get(MODULE)
        if self._before or module is None or not hasattr(module, "PreTrainedModel"):
            return  # already replaced, not imported, or still being imported
        model = module.PreTrainedModel
        _fit_biases_by_shape(model)
        absent = [] if LOADER in vars(model) else [f"PreTrainedModel.{LOADER}"]
        absent += [] if DETECTION in vars(module) else [f"{MODULE}.{DETECTION}"]
        if absent:
            raise ConfigError(
                f"the installed transformers has no {' and no '.join(absent)}, which windlass.zero.Init replaces; "
                "install the transformers that docs/construction.md names"
            )
        held = [(module, DETECTION), (model, LOADER), (model, MISSING)]
        self._before = [(holder, name, vars(holder)[name]) for holder, name in held if name in vars(holder)]
        if MISSING not in vars(model):
            self._refuse_loading()
            return
        original, originally_moved = getattr(model, LOADER), getattr(model, MISSING)

        def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any, **named: Any) -> Any:
            given = self._promised(state_dict, checkpoint_files, load_config)
            result = original(model, given, checkpoint_files, load_config, *more, **named)
            _refuse_mismatch(
                result[0] if isinstance(result, tuple) else result, load_config
            )  # transformers 5.0 returns only the first element
            return result

        def move(model: Any, missing_keys: Any, *more: Any, **named: Any) -> Any:
            return originally_moved(model, _InOrder(missing_keys), *more, **named)

        setattr(module, DETECTION, lambda: False)
        setattr(model, MISSING, move)
        setattr(model, LOADER, staticmethod(load))

    def undo(self) -> None:
        """Restore the functions."""
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
                "a quantised model can't be built under windlass.zero.Init; load it outside of Init, or without "
                "quantization"
            )
        if state_dict is not None or not files:
            return state_dict
        if not all(str(file).endswith(".safetensors") for file in files):
            logger.warning(
                f"{files[0]} is not a safetensors file, so every rank reads all of it; convert it to safetensors"
            )
            return None
        return deferred_from_files([Path(file) for file in files], computes=self._computes)


def _fit_biases_by_shape(model: Any) -> None:
    """Let `PreTrainedModel` skip the padding of a sharded bias that already fits its weight. Idempotent.

    Tying weights pads the head's bias to the number of rows of the weight. The original reads the bias even if there is
    nothing to pad, which would gather it or raise. Weights are also tied after the context, so `undo` does not restore
    the original.
    """
    original = vars(model).get(FIT_BIAS)
    if original is None or getattr(original, "fits_by_shape", False):
        return

    def fit(self: Any, output_embeddings: Any, input_embeddings: Any) -> Any:
        bias, weight = (getattr(output_embeddings, name, None) for name in ("bias", "weight"))
        fits = isinstance(bias, ShardedParameter) and weight is not None and bias.shape[0] == weight.shape[0]
        if not fits:
            return original(self, output_embeddings, input_embeddings)
        if hasattr(output_embeddings, "out_features") and hasattr(input_embeddings, "num_embeddings"):
            output_embeddings.out_features = input_embeddings.num_embeddings
        return None

    fit.fits_by_shape = True  # type: ignore[attr-defined]
    setattr(model, FIT_BIAS, fit)


class _InOrder(set[str]):
    """Set of missing keys whose difference with another set is a sorted list.

    transformers creates parameters for the missing keys in the order of a set, which differs between processes. The
    ranks must create the parameters in the same order.
    """

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
