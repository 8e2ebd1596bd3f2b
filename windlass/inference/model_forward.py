"""Call of a causal language model on token ids, for any signature of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.sequence.position_ids import find_position_derivation


class CausalForward:
    """Forward of a model from flat tokens to logits.

    Args:
        model: a causal language model of transformers, or a module with a forward that takes `input_ids` (or one
            positional argument) and optionally `position_ids`, and whose output `get_logits` accepts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self.accepts = set(parameters)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            self.accepts |= _passed_through(model)
        self._ids_by_name = "input_ids" in self.accepts
        self._selects = "logits_to_keep" in self.accepts
        self._first_position = find_first_position(model)

    @property
    def takes_positions(self) -> bool:
        """True if positions can be given, so that several sequences can follow one another in one row."""
        return "position_ids" in self.accepts

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of `rows`, float32 `[rows, vocabulary]`.

        Args:
            token_ids, positions: int64 `[tokens]`; positions are left out if None.
            rows: int64 `[rows]`, indices of the tokens that get logits.

        Raises:
            ModelError: the model returned no logits, or logits of another number of tokens.
        """
        arguments = self.make_arguments(token_ids, positions, rows)
        if not self._ids_by_name:
            return self.select_logits(self.model(token_ids[None], **arguments), len(token_ids), rows)
        return self.select_logits(self.model(input_ids=token_ids[None], **arguments), len(token_ids), rows)

    def make_arguments(
        self, token_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor
    ) -> dict[str, Any]:
        """Return the keyword arguments other than the token ids."""
        arguments: dict[str, Any] = {}
        if positions is not None:
            first = self._first_position
            arguments["position_ids"] = (positions + first if first else positions)[None]
        if "attention_mask" in self.accepts and positions is not None:
            # an explicit mask keeps transformers from looking for packed documents in the positions
            arguments["attention_mask"] = torch.ones(1, len(token_ids), dtype=torch.long, device=token_ids.device)
        for name, value in (("use_cache", False), ("return_dict", True), ("output_router_logits", False)):
            if name in self.accepts:
                arguments[name] = value
        if self._selects:
            arguments["logits_to_keep"] = rows
        return arguments

    def select_logits(self, result: Any, num_tokens: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of `rows`, float32 `[rows, vocabulary]`, from the return value of the model.

        Raises:
            ModelError: `result` has no logits, or logits of another number of tokens.
        """
        logits = get_logits(result)
        logits = logits[0] if logits.dim() == 3 else logits
        if not self._selects or logits.shape[0] != len(rows):
            if logits.shape[0] != num_tokens:
                raise ModelError(
                    f"{type(self.model).__name__} returned logits of shape {tuple(logits.shape)} for "
                    f"{num_tokens} tokens; its forward must return [samples, tokens, vocabulary]"
                )
            logits = logits[rows]
        return logits.float()


def run_probe(forward: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]) -> None:
    """Run a forward of two tokens, in which hooks record the layers that are called and their inputs."""
    ids = torch.zeros(2, dtype=torch.long)
    with torch.inference_mode():
        forward(ids, None, ids[:1])


def own_modes(*, allocates: bool = False) -> AbstractContextManager[None]:
    """Disable the caller's autocast and default device inside the `with` block, so that an engine computes in its
    model's dtype and makes its indices on the CPU.

    Args:
        allocates: True: leave inference mode too, because tensors made in it cannot be written outside of it later.
    """
    found: list[AbstractContextManager[Any]] = []
    if allocates and torch.is_inference_mode_enabled():
        found.append(torch.inference_mode(False))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            found.append(torch.autocast(kind, enabled=False))
    if torch.get_default_device().type != "cpu":
        found.append(torch.device("cpu"))
    return _enter_all(found) if found else nullcontext()  # usually none: this runs in each step


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return a configuration's settings of rotary embeddings, including those of individual layer types."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if isinstance(settings, dict):
            nested = [value for value in settings.values() if isinstance(value, dict)]
            found += [settings, *nested]
    return found


def find_first_position(model: nn.Module) -> int:
    """Return the position of a sequence's first token: 0, except for RoBERTa and similar models, which count
    from `pad_token_id + 1`.
    """
    derive = find_position_derivation(model)
    if derive is None:
        return 0
    try:
        # at least one of the tokens 0 and 1 is not the padding token, which has a lower position
        return max(int(derive({"input_ids": torch.tensor([[token]])})) for token in (0, 1))
    except ModelError:  # unknown; if it is not 0, the check at load finds different logits and rejects the runner
        return 0


def find_device(model: nn.Module) -> torch.device:
    """Return the device of the model's weights. Parameters on the meta device do not count: they were packed."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return parameter.device
    return torch.device("cpu")


def find_decoder(model: Any) -> nn.Module | None:
    """Return the module inside a causal language model that computes hidden states; None: there is none."""
    prefix = getattr(model, "base_model_prefix", "") or "_"
    found: nn.Module | None = getattr(model, "get_decoder", lambda: None)() or getattr(model, prefix, None)
    return None if found is model else found


def get_logits(result: Any) -> torch.Tensor:
    """Return the logits of a model's output: the output itself, its `logits`, or its first element.

    Raises:
        ModelError: the output has no logits.
    """
    for candidate in (
        result,
        getattr(result, "logits", None),
        result[0] if isinstance(result, (tuple, list)) else None,
    ):
        if isinstance(candidate, torch.Tensor):
            return candidate
    raise ModelError(f"the model returned {type(result).__name__} without logits; it is not a causal language model")


def _passed_through(model: nn.Module) -> set[str]:
    """Return the argument names of the inner decoder, to which a forward with `**kwargs` passes its arguments."""
    inner = getattr(model, "get_decoder", lambda: None)()
    if inner is None or inner is model:
        inner = getattr(model, getattr(model, "base_model_prefix", "") or "_", None)
    return set(inspect.signature(inner.forward).parameters) if isinstance(inner, nn.Module) else set()
