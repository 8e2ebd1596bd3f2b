"""Tests of the active attention backend: nesting, exceptions, threads, recomputation and the registry of names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from windlass.attention import (
    CAUSAL,
    AttentionBackend,
    AttentionMask,
    attention,
    backend_names,
    bind_mask,
    checkpoint_context_fn,
    get_active_backend,
    get_backend,
    install_attention,
    register_backend,
    use_backend,
)
from windlass.attention import backend_registry as registry
from windlass.attention.eager_backend import EagerBackend
from windlass.attention.transformers_dispatch import attention_forward
from windlass.base.errors import ConfigError, ModelError


class Doubling(EagerBackend):
    """Backend that returns twice the attention."""

    name = "doubling"

    def attend(self, *arguments: Any, **named: Any) -> Tensor:
        return 2 * super().attend(*arguments, **named)


@pytest.fixture
def names() -> Iterator[None]:
    """Restore the backend registry after the test."""
    before = dict(registry._factories)
    yield
    registry._factories.clear()
    registry._factories.update(before)


def tensors(heads: int = 4, keys: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 7, 8, dtype=torch.float64).requires_grad_() for n in (heads, keys, keys))
    return q, k, v


def test_backend_contexts_nest_and_are_removed_by_an_exception() -> None:
    outer, inner = Doubling(), Doubling()
    assert get_active_backend() is None
    with use_backend(outer) as result:
        assert result is outer and get_active_backend() is outer
        with use_backend(None):
            assert get_active_backend() is None
        with pytest.raises(RuntimeError, match="inside"), use_backend(inner):
            assert get_active_backend() is inner
            raise RuntimeError("inside")
        assert get_active_backend() is outer
    assert get_active_backend() is None


def test_active_backends_are_thread_local() -> None:
    seen: dict[str, Any] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        seen["before"] = get_active_backend()
        with use_backend("eager"):
            inside.set()
            assert done.wait(60)
            seen["during"] = get_active_backend()

    backend = Doubling()
    with use_backend(backend):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        assert get_active_backend() is backend
        done.set()
        thread.join(60)
    assert seen["before"] is None and isinstance(seen["during"], EagerBackend)
    assert get_active_backend() is None


@pytest.mark.parametrize("backend", [None, "sdpa", "eager"])
@pytest.mark.parametrize("kind", ["all", "causal", "padded", "tensor"])
def test_attention_function_equals_torch_sdpa(backend: str | None, kind: str) -> None:
    q, k, v = tensors()
    given: dict[str, Any] = {"is_causal": True} if kind == "causal" else {}
    requested: dict[str, Any] = dict(given)
    if kind in ("padded", "tensor"):
        padding = torch.ones(2, 7, dtype=torch.bool)
        padding[0, 5:] = False
        description = AttentionMask(2, 7, 7, padding=padding)
        requested["attn_mask"] = description.to_dense()
        given["mask"] = description if kind == "padded" else requested["attn_mask"]
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3, **requested)
    gradient = torch.randn_like(expected)
    wanted_gradients = torch.autograd.grad(expected, (q, k, v), gradient)
    with use_backend(backend):
        output = attention(q, k, v, scaling=0.3, **given)
    actual = torch.autograd.grad(output, (q, k, v), gradient)
    for item, other in zip((output, *actual), (expected, *wanted_gradients), strict=True):
        torch.testing.assert_close(item, other, rtol=1e-9, atol=1e-10)


def test_bound_mask_and_recomputation_use_the_backend_of_the_forward() -> None:
    q, k, v = tensors()
    plain = scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True)
    expected = torch.autograd.grad((2 * plain).square().sum(), q)[0]
    with use_backend(Doubling()):
        bound = bind_mask(AttentionMask(2, 7, 7, CAUSAL))
        full = checkpoint(
            lambda x: attention(x, k, v, is_causal=True), q, use_reentrant=False, context_fn=checkpoint_context_fn
        )
        masked = checkpoint(lambda x: attention(x, k, v, bound), q, use_reentrant=False)
    assert get_active_backend() is None
    torch.testing.assert_close(attention(q, k, v, bound), 2 * plain)
    for output in (full, masked):
        torch.testing.assert_close(torch.autograd.grad(output.square().sum(), q)[0], expected)


def test_activation_checkpointing_keeps_the_backend() -> None:
    from windlass.checkpointing import checkpoint as windlass_checkpoint

    q, k, v = tensors()
    plain = scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True)
    expected = torch.autograd.grad((2 * plain).square().sum(), q)[0]
    with use_backend(Doubling()):
        output = windlass_checkpoint(lambda x: attention(x, k, v, is_causal=True), q)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), q)[0], expected)


def test_invalid_arguments_are_refused_by_name() -> None:
    q, k, v = tensors()
    with pytest.raises(ModelError, match="mask and is_causal=True"):
        attention(q, k, v, AttentionMask(2, 7, 7), is_causal=True)
    with pytest.raises(ModelError, match=r"\['softcap'\].*\"sdpa\" does not support"):
        attention(q, k, v, softcap=2.0)
    with pytest.raises(ModelError, match="4 query heads are not a multiple of 3 key heads"):
        attention(*tensors(4, 3))
    with pytest.raises(ModelError, match="mask of type str"):
        attention(q, k, v, "causal")  # type: ignore[arg-type]


def test_backend_registry(names: None) -> None:
    assert {"sdpa", "eager"} <= set(backend_names())
    register_backend("doubling", Doubling)
    register_backend("doubling", Doubling)
    assert isinstance(get_backend("doubling"), Doubling)
    with use_backend("doubling"):
        assert isinstance(get_active_backend(), Doubling)
    with pytest.raises(ConfigError, match='"doubling" is registered already'):
        register_backend("doubling", EagerBackend)
    with pytest.raises(ConfigError, match="non-empty"):
        register_backend("", EagerBackend)
    with pytest.raises(ConfigError, match='no attention backend "flashy" is registered; registered are .*eager'):
        get_backend("flashy")
    with pytest.raises(ConfigError, match=r"\"doubling\" got the options \['speed'\]"):
        get_backend("doubling", speed=3)
    with pytest.raises(ConfigError, match="flashy"), use_backend("flashy"):
        pass
    assert get_active_backend() is None


def test_an_error_inside_a_factory_is_not_an_error_of_its_options(names: None) -> None:
    def make(speed: Any) -> Doubling:
        speed + 1  # raises in the factory if `speed` is None
        return Doubling()

    register_backend("doubling", make)
    assert isinstance(get_backend("doubling", speed=3), Doubling)
    with pytest.raises(TypeError, match="unsupported operand"):
        get_backend("doubling", speed=None)
    with pytest.raises(ConfigError, match=r"\"doubling\" got the options \[\]: missing a required argument: 'speed'"):
        get_backend("doubling")


class _Nameless(AttentionBackend):
    """Backend without the required `name` and `attend`."""


def test_incomplete_backends_are_refused_with_their_missing_parts(names: None) -> None:
    half = SimpleNamespace(
        **{name: None for name in ("supported_arguments", "computes_local_heads", "check", "attend")}
    )
    missing = (
        r"the attention backend \"half\" \(SimpleNamespace\) does not define depends_on_head and make_mask; subclass"
    )
    half.name = "half"
    register_backend("half", lambda: half)  # type: ignore[arg-type, return-value]
    transformer = SimpleNamespace(set_attn_implementation=None, config=None, _can_set_attn_implementation=lambda: True)
    transformer.modules = lambda: []
    for refused in (half, "half"):
        with pytest.raises(ConfigError, match=missing), use_backend(refused):
            raise AssertionError
        with pytest.raises(ConfigError, match=missing):
            install_attention(transformer, refused)
    with (
        pytest.raises(ConfigError, match="_Nameless.*does not define name and attend; subclass"),
        use_backend(_Nameless()),
    ):
        raise AssertionError
    for thing, text in (
        (3, "3 is not an attention backend; subclass"),
        (EagerBackend, "the class EagerBackend; pass an"),
    ):
        with pytest.raises(ConfigError, match=text), use_backend(thing):  # type: ignore[arg-type]
            raise AssertionError
    with pytest.raises(ConfigError, match=r'register_backend\("eager2"\).*pass the class'):
        register_backend("eager2", EagerBackend())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "returned 'NoneType'"),
        (torch.zeros(2, 7, 4, 8), r"shape \(2, 7, 4, 8\).* \(2, 4, 7, 8\); return output.transpose\(1, 2\)"),
        (torch.zeros(2, 4, 7, 9), r"shape \(2, 4, 7, 9\).* \(2, 4, 7, 8\); correct attend"),
    ],
)
def test_a_result_of_another_shape_names_the_backend(result: Any, text: str) -> None:
    class Wrong(EagerBackend):
        name = "wrong"

        def attend(self, *arguments: Any, **named: Any) -> Tensor:
            return result  # type: ignore[no-any-return]

    with use_backend(Wrong()):
        for call in (attention, partial(attention_forward, nn.Identity(), attention_mask=None)):
            with pytest.raises(ModelError, match=f'the attention backend "wrong" .*{text}'):
                call(*tensors())


def test_backend_protocol_is_structural() -> None:
    assert isinstance(EagerBackend(), AttentionBackend)
    assert not isinstance(nn.Linear(1, 1), AttentionBackend)
