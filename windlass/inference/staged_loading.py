"""Loading of one stage of a model: the other stages are removed before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import MeshAxis
from windlass.inference.stage_link import split_for_inference


class StagedModelSource:
    """Source of a causal language model that reads only the weights of one stage.

    transformers builds a model on the meta device and then reads the tensors that the model has. `from_pretrained`
    makes it build a subclass of the model's class whose constructor ends with the removal of all other stages.

    Args:
        config: config of the model.
        axis: the mesh axis pp.
    """

    def __init__(self, config: Any, axis: MeshAxis) -> None:
        self._config, self._axis = config, axis

    def from_pretrained(self, path: str | Path, *, trust_remote_code: bool, **arguments: Any) -> Any:
        """Load this rank's stage; see transformers' method of the same name.

        Raises:
            ConfigError: there are fewer layers than stages.
            ModelError: the files lack weights of this stage, or the model has custom code or cannot be split.
            ValueError: transformers has no causal language model for the config.
        """
        kind = _find_class(self._config, path)
        axis = self._axis

        def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            kind.__init__(self, config, *args, **kwargs)
            _tie_weights(self)
            split_for_inference(self, axis)
            _keep_local_ties(self)

        # suppress the warning about tensors of other stages in the files, which this model does not have
        changes = {"__init__": build, "__module__": kind.__module__, "_keys_to_ignore_on_load_unexpected": [r"."]}
        staged: Any = type(kind.__name__, (kind,), changes)
        model, facts = staged.from_pretrained(
            path, trust_remote_code=trust_remote_code, output_loading_info=True, **arguments
        )
        if missing := sorted(facts["missing_keys"]):
            raise ModelError(
                f"{path} lacks {len(missing)} weights of this stage, e.g. {missing[0]}; fetch or save the model again"
            )
        model.__class__ = kind
        return model


def _tie_weights(model: Any) -> None:
    """Tie weights before the split, which depends on ties: transformers ties them only at the end of loading."""
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        path, _, name = target.rpartition(".")
        setattr(model.get_submodule(path), name, model.get_parameter(source))


def _keep_local_ties(model: Any) -> None:
    """Remove each pair of weights from the model's record of tied weights, unless this stage has both."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = getattr(model, "all_tied_weights_keys", None)
    if isinstance(ties, dict):
        model.all_tied_weights_keys = {one: other for one, other in ties.items() if {one, other} <= names}


def _find_class(config: Any, path: str | Path) -> Any:
    """Return the class of transformers that AutoModelForCausalLM would build.

    Raises:
        ModelError: the model has custom code (`auto_map` of its config).
        ValueError: transformers has no such class for `config`.
    """
    import transformers

    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM") is not None:
        raise ModelError(f"{path} has code of its own for its model, which pp does not split; use tp, or set pp to 1")
    if type(config) not in mapping:
        raise ValueError(f"{type(config).__name__} has no causal language model in transformers")
    found = mapping[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found
