"""Precision sections, and the one table of dtypes that follows from them."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Annotated, Literal

from pydantic import Field

from windlass.config.section import NUMBER, DtypeName, Names, Positive, Section
from windlass.config.verdict import accepted, honoured, refused


class Fp16(Section):
    """Training with fp16 parameters, fp32 master weights and a loss scale."""

    switch = "enabled"

    enabled: bool = honoured(False)
    """Keep and compute parameters in fp16."""
    auto_cast: bool = honoured(False)
    """Cast floating-point inputs of the model to fp16."""
    loss_scale: Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER] = honoured(0.0)
    """Static loss scale; 0 chooses dynamic scaling."""
    initial_scale_power: Annotated[int, Field(gt=0, le=126), NUMBER] = honoured(16)
    """Dynamic scaling starts at 2 to this power."""
    loss_scale_window: Positive = honoured(1000)
    """Steps without overflow after which the scale doubles."""
    hysteresis: Positive = honoured(2)
    """Overflows that are tolerated before the scale is halved."""
    consecutive_hysteresis: bool = honoured(False)
    """Refill the tolerated overflows after every good step, so that only overflows in a row count."""
    min_loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER] = honoured(1.0)
    """The scale never falls below this."""
    fp16_master_weights_and_grads: bool = refused(
        False, "not yet built: 16-bit master weights belong to host offload; write false"
    )


class Bf16(Section):
    """Training with bf16 parameters and fp32 master weights; no loss scale is needed."""

    switch = "enabled"

    enabled: bool = honoured(False)
    """Keep and compute parameters in bf16."""
    immediate_grad_update: bool = accepted(
        False, "gradients always go into the accumulation buffer as they arrive, so there is nothing to choose"
    )
    check_grad_overflow: bool = accepted(
        True,
        "always on: a gradient that is not finite is an error before a weight changes (by way of "
        "`deepspeed.initialize` the step is skipped); the check rides in the norm",
    )
    check_overflow: bool = refused(False, "retired: the name never worked; write check_grad_overflow")
    bf16_master_weights_and_grads: bool = refused(False, "not yet built: master weights are fp32; write false")
    bf16_optimizer_states: bool = refused(False, "not yet built: optimizer states are fp32; write false")


class TorchAutocast(Section):
    """`torch.autocast` around the forward pass; parameters stay as they are."""

    switch = "enabled"

    enabled: bool = honoured(False)
    """Run the forward pass under `torch.autocast`."""
    dtype: DtypeName | None = honoured(None)
    """The autocast dtype; bf16 when absent."""
    lower_precision_safe_modules: Names | None = refused(
        None, "not yet built: torch's own list of operations decides what autocast lowers; delete the key"
    )


class DataTypes(Section):
    """Dtypes that do not follow from the fp16 and bf16 sections."""

    grad_accum_dtype: DtypeName | None = honoured(None)
    """Dtype in which micro-batch gradients are added up; fp32 when absent, at every stage."""
    param_dtype: DtypeName | None = honoured(None)
    """Dtype of the parameters; must agree with fp16.enabled and bf16.enabled."""
    buffer_dtype: DtypeName | None = refused(
        None, "not yet built: buffers keep the dtype they were made with; delete the key"
    )
    keep_in_fp32_modules: Literal["auto"] | Names = refused(
        "auto", "not yet built: a module cannot be exempted from fp16 or bf16; delete the key"
    )


@dataclass(frozen=True)
class DtypeTable:
    """The dtype of everything that has one, by short name; the same at every stage."""

    parameter: str
    compute: str
    accumulate: str
    reduce: str
    master: str
    state: str

    def __str__(self) -> str:
        pairs = zip((field.name for field in fields(self)), astuple(self), strict=True)
        return ", ".join(f"{name} {dtype}" for name, dtype in pairs)
