"""Module `deepspeed.runtime.config_utils`: base class of configuration models, which other libraries subclass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict

from windlass.compat.rank_logging import logger


class DeepSpeedConfigModel(BaseModel):
    """Base class of configuration sections.

    Unknown keys are errors, and assignments are validated. Unless `strict`, the value "auto" means the default, except
    for the key `replace_method`.

    A field whose `json_schema_extra` sets `deprecated` is forwarded to the field named in `new_param` (dotted for a
    nested section), converted by `new_param_fn`, unless `set_new_param` is False. Setting both raises AssertionError.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        if not strict:
            data = {key: value for key, value in data.items() if value != "auto" or key == "replace_method"}
        super().__init__(**data)
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated", False) and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, name: str, extra: dict[str, Any]) -> None:
        message = extra.get("deprecated_msg", "")
        new = extra.get("new_param", "")
        logger.warning(f"{type(self).__name__}: {name} is deprecated{f', use {new}' if new else ''}. {message}".strip())
        if not new or not extra.get("set_new_param", True):
            return
        *sections, last = new.split(".")
        holder = reduce(getattr, sections, self)
        assert last not in holder.model_fields_set, f"{name} is the old name of {new}: set only one of them"
        setattr(holder, last, extra.get("new_param_fn", lambda value: value)(getattr(self, name)))


class DeepSpeedConfigObject:
    """Object whose repr is the JSON of its attributes."""

    def repr(self) -> dict[str, Any]:
        """Return the attributes."""
        return self.__dict__

    def __repr__(self) -> str:
        return json.dumps(self.__dict__, sort_keys=True, indent=4, default=str)


def get_scalar_param(param_dict: dict[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return the value of a key, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """Return the default of a field.

    Raises:
        AssertionError: the field does not exist, or it has no default.
    """
    assert field_name in config.model_fields, f"{field_name!r} is not a field of {config.__name__}; see model_fields"
    assert not config.model_fields[field_name].is_required(), f"{field_name!r} of {config.__name__} has no default"
    return config.model_fields[field_name].get_default()


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dict of pairs, for `json.load(object_pairs_hook=...)`.

    Raises:
        ValueError: a key occurs twice.
    """
    twice = [key for key, count in Counter(key for key, _ in ordered_pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Duplicate keys in the configuration: {twice}; write each once")
    return dict(ordered_pairs)
