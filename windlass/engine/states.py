"""This rank's optimizer states as a checkpoint holds them.

[Note: kinds of states] A checkpoint says of each state of a parameter what it is:

- `pieces DTYPE`: one value an element, cut as the parameter is;
- `signed uint8`, `unsigned uint8`: likewise, but codes of 8 bits; the scales of the span `[start, stop)` lie beside
  them under `.../KEY_scale/START` ([Note: codes that are cut elsewhere]). Of a parameter that is cut over tp or ep the
  blocks are those of its parts, which another layout does not have: what the codes mean is saved, as `pieces float32`;
- `whole DTYPE`: one tensor for the parameter, a count or what only its rule knows;
- `value`: a plain Python value (or a tensor of no elements), kept in the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import Drawer, FlatShard, Resting
from windlass.engine.away import ChunkAway
from windlass.optim import coded
from windlass.optim.cpu_optimizer import Format
from windlass.zero.chunk import Chunk, Tenancy
from windlass.zero.residence import Residence
from windlass.zero.update import ElementwiseUpdate
from windlass.zero.whole import WholeUpdate

Update = ElementwiseUpdate | WholeUpdate


@dataclass
class Outgoing:
    """What a rank saves of its states: tensors, and by parameter and key their kinds, values and spans."""

    shards: list[FlatShard] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        """The plain data."""
        return {"states": self.kinds, "values": self.values, "spans": self.spans}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks say about their states, as one."""
    states: dict[str, dict[str, str]] = {}
    values: dict[str, dict[str, Any]] = {}
    spans: dict[str, set[tuple[int, int]]] = {}
    for part in parts:
        for name, keys in part["states"].items():
            states.setdefault(name, {}).update(keys)
        for name, found in part["values"].items():
            values.setdefault(name, {}).update(found)
        for name, cuts in part["spans"].items():
            spans.setdefault(name, set()).update(cuts)
    return {"states": states, "values": values, "spans": {name: sorted(cuts) for name, cuts in spans.items()}}


def outgoing(update: Update, drawer_of: Callable[[Chunk], Drawer], found: Outgoing) -> None:
    """Put all states of this rank into `found`.

    Raises:
        CheckpointError: one is neither of an element nor of a parameter.
    """
    formats = update.formats()
    for tenancy in update.tenancies():
        drawer = drawer_of(tenancy.chunk)
        state = update.residence.described(tenancy.chunk, tenancy.tenant)
        codes = {key: one for key, one in formats.get(id(tenancy.parameter), {}).items() if is_coded(state, key, one)}
        scales = {f"{key}_scale" for key in codes}
        in_part = not tenancy.chunk.unit.placements[tenancy.index].whole
        for key, value in state.items():
            if key in scales:
                continue
            if key in codes and in_part:
                kind = "pieces float32"
            elif key in codes:
                kind = "signed uint8" if codes[key].signed else "unsigned uint8"
                _send_scales(found, tenancy, key, _at_rest(update, drawer, tenancy, f"{key}_scale", state))
            else:
                kind = kind_of(update, tenancy, key, value)
            found.kinds.setdefault(tenancy.name, {})[key] = kind
            where = f"state/{tenancy.name}/{key}"
            if kind == "value":
                found.values.setdefault(tenancy.name, {})[key] = value
            elif value.dim() == 0:
                found.tensors[where] = value
            else:
                whole = kind.startswith("whole")
                unit = tenancy.chunk.unit
                shape = tuple(value.shape if whole else unit.shapes[tenancy.index])
                resting = _at_rest(update, drawer, tenancy, key, state)
                if key in codes and in_part:
                    resting = _decoding(resting, _at_rest(update, drawer, tenancy, f"{key}_scale", state), codes[key])
                of = None if whole else unit.placements[tenancy.index]
                found.shards.append(FlatShard(where, shape, 0 if whole else tenancy.start, resting, of))


def is_coded(state: dict[str, Any], key: str, kept: Format) -> bool:
    """Whether a state that is kept so is there as codes."""
    return kept.coded and key in state and f"{key}_scale" in state


def kind_of(update: Update, tenancy: Tenancy, key: str, value: Any) -> str:
    """What a state that is not coded is; see [Note: kinds of states].

    Raises:
        CheckpointError: it is neither of an element nor of a parameter.
    """
    if not isinstance(value, torch.Tensor) or not value.numel():
        return "value"
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() == 0:
        return f"whole {dtype}"
    if value.shape == tenancy.shape:
        return f"pieces {dtype}"
    if isinstance(update, ElementwiseUpdate):
        raise CheckpointError(strange(update, tenancy, key, tuple(value.shape)))
    return f"whole {dtype}"


def strange(update: Update, tenancy: Tenancy, key: str, shape: tuple[int, ...]) -> str:
    """What is said of a state that is neither of an element nor of a parameter."""
    rule = type(update.optimizer).__name__
    return (
        f"optimizer state {key!r} of {tenancy.name!r} has shape {shape}: {rule} is stepped on flat pieces (here of "
        f"{tenancy.stop - tenancy.start} elements), and a checkpoint can cut and join only states with one value an "
        "element or one for all; pass a subclass of the optimizer, which is stepped on whole parameters"
    )


def _send_scales(found: Outgoing, tenancy: Tenancy, key: str, scales: Resting) -> None:
    where = f"state/{tenancy.name}/{key}_scale/{tenancy.start}"
    found.shards.append(FlatShard(where, (scales.numel,), 0, scales))
    spans = found.spans.setdefault(tenancy.name, [])
    if (tenancy.start, tenancy.stop) not in spans[-1:]:
        spans.append((tenancy.start, tenancy.stop))


def _decoding(codes: Resting, scales: Resting, kept: Format) -> Resting:
    """What codes mean, decoded when their drawer is open."""
    return Resting(codes.numel, torch.float32, codes.drawer, lambda: decoded(codes.get(), scales.get(), kept.signed))


def decoded(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """What flat codes with scales of their own mean, in float32 on the CPU."""
    values = torch.empty(codes.numel(), dtype=torch.float32, device="cpu")
    coded.read(codes, 0, [coded.Scales(0, codes.numel(), 0, scales)], signed, values)
    return values


def _at_rest(update: Update, drawer: Drawer, tenancy: Tenancy, key: str, state: dict[str, Any]) -> Resting:
    like = state[key]
    if isinstance(drawer, ChunkAway):
        return Resting(like.numel(), like.dtype, drawer, partial(drawer.state, tenancy.tenant, key))
    return Resting(like.numel(), like.dtype, drawer, partial(of_tenant, update.residence, tenancy, key))


def of_tenant(residence: Residence, tenancy: Tenancy, key: str) -> torch.Tensor:
    """A state as a flat tensor, while its chunk is at hand."""
    value: torch.Tensor = residence.states[tenancy.tenant][key]
    return value.reshape(-1)
