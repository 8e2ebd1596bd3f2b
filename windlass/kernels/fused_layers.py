"""Small layers of inference as one native call each: RMS norms with residuals, rotary embeddings, gated activations.

Each takes float32 or bfloat16 CPU tensors, computes in float32 and rounds each result once; the PyTorch reference does
the same where native code is missing. The result of a row does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from windlass.base.errors import ModelError
from windlass.kernels.inference_path import get_inference_path, tensor_address

LAYER_DTYPES = (torch.float32, torch.bfloat16)
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    residual: torch.Tensor | None = None,
    path: str | None = None,
) -> torch.Tensor:
    """Return `x / sqrt(mean(x ** 2) + epsilon) * weight` over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: `[..., features]`.
        weight: float32 `[features]`. Layers that multiply by `1 + weight` (Gemma) pass that sum.
        residual: tensor of the shape and dtype of `x`; `x` is added to it in place, and the sum is normalized.
        path: one of `list_inference_paths()` in place of the active one.

    Raises:
        ModelError: shapes or dtypes do not match.
    """
    _check_dtype("input of the norm", x)
    if tuple(weight.shape) != x.shape[-1:] or weight.dtype != torch.float32:
        raise ModelError(
            f"a norm's weight of shape {tuple(weight.shape)} and {weight.dtype} does not fit an input of shape "
            f"{tuple(x.shape)}; give torch.float32 of shape ({x.shape[-1]},)"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ModelError(
            f"a residual of shape {tuple(residual.shape)} and {residual.dtype} does not fit an input of shape "
            f"{tuple(x.shape)} and {x.dtype}; give the same"
        )
    chosen = get_inference_path(path)
    if chosen.module is None or x.numel() == 0:
        if residual is not None:
            x = residual.add_(x)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)
    x = x.contiguous()
    out = torch.empty_like(x)
    chosen.module.rms_norm(
        chosen.number,
        tensor_address("input of the norm", x),
        0 if residual is None else tensor_address("residual", residual),
        tensor_address("norm's weight", weight),
        out.data_ptr(),
        x.dtype == torch.bfloat16,
        x.numel() // x.shape[-1],
        x.shape[-1],
        epsilon,
        torch.get_num_threads(),
    )
    return out


def apply_rotary(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, path: str | None = None) -> None:
    """Rotate the first features of every head in place, pairing feature `i` with `i + rotary_dim / 2` (Su et al. 2021).

    Args:
        x: `[tokens, heads, head_dim]`; it may be a view of the output of a fused QKV projection, if the last two
            dimensions are contiguous.
        cosines, sines: float32 `[tokens, rotary_dim]`, with an even `rotary_dim <= head_dim`.
        path: one of `list_inference_paths()` in place of the active one.

    Raises:
        ModelError: shapes, strides or dtypes do not match.
    """
    _check_dtype("input of the rotation", x)
    if x.dim() != 3 or cosines.shape != sines.shape or cosines.dim() != 2 or cosines.shape[0] != x.shape[0]:
        raise ModelError(
            f"angles of shapes {tuple(cosines.shape)} and {tuple(sines.shape)} do not fit an input of shape "
            f"{tuple(x.shape)}; give [tokens, rotary_dim] for [tokens, heads, head_dim]"
        )
    tokens, heads, head_dim = x.shape
    rotary_dim = cosines.shape[1]
    if rotary_dim > head_dim or rotary_dim % 2 or cosines.dtype != torch.float32 or sines.dtype != torch.float32:
        raise ModelError(
            f"{rotary_dim} angles of {cosines.dtype} do not fit heads of {head_dim} features; give an even number of "
            "torch.float32, at most those"
        )
    if x.numel() == 0 or rotary_dim == 0:
        return
    chosen = get_inference_path(path)
    if chosen.module is None:
        part = x[..., :rotary_dim].float()
        low, high = part.chunk(2, -1)
        turned = torch.cat([-high, low], -1)
        x[..., :rotary_dim] = (part * cosines[:, None] + turned * sines[:, None]).to(x.dtype)
        return
    if x.stride(2) != 1 or (heads > 1 and x.stride(1) != head_dim) or (tokens > 1 and x.stride(0) < heads * head_dim):
        raise ModelError(
            f"the input of the rotation has strides {x.stride()}; its last two dimensions must be contiguous"
        )
    cosines, sines = cosines.contiguous(), sines.contiguous()  # bound to names: an address does not keep a copy alive
    chosen.module.rotary(
        chosen.number,
        tensor_address("input of the rotation", x[0]) if tokens else 0,
        x.dtype == torch.bfloat16,
        tokens,
        x.stride(0) if tokens > 1 else heads * head_dim,
        heads,
        head_dim,
        rotary_dim,
        tensor_address("tensor of cosines", cosines),
        tensor_address("tensor of sines", sines),
        torch.get_num_threads(),
    )


def gated_activation(gate_up: torch.Tensor, activation: str = "silu", *, path: str | None = None) -> torch.Tensor:
    """Return `activation(gate) * up` (Shazeer 2020).

    Args:
        gate_up: `[..., 2 * features]`; the first half is the gate.
        activation: "silu" or "gelu_tanh".
        path: one of `list_inference_paths()` in place of the active one.

    Returns:
        `[..., features]`.

    Raises:
        ModelError: the dtype is not supported, the last dimension is odd, or there is no such activation.
    """
    _check_dtype("input of the activation", gate_up)
    if activation not in ACTIVATION_CODES:
        raise ModelError(f"there is no activation {activation!r}; use one of {', '.join(ACTIVATION_CODES)}")
    if gate_up.shape[-1] % 2:
        raise ModelError(f"gate and up of shape {tuple(gate_up.shape)} are not halves; join two matrices of one size")
    features = gate_up.shape[-1] // 2
    chosen = get_inference_path(path)
    if chosen.module is None or gate_up.numel() == 0:
        gate, up = gate_up.float().chunk(2, -1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (active * up).to(gate_up.dtype)
    gate_up = gate_up.contiguous()
    out = torch.empty((*gate_up.shape[:-1], features), dtype=gate_up.dtype)
    chosen.module.gated_activation(
        chosen.number,
        ACTIVATION_CODES[activation],
        tensor_address("input of the activation", gate_up),
        out.data_ptr(),
        gate_up.dtype == torch.bfloat16,
        out.numel() // features,
        features,
        torch.get_num_threads(),
    )
    return out


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in LAYER_DTYPES:
        raise ModelError(f"the {name} is {tensor.dtype}; convert it to torch.float32 or bfloat16")
