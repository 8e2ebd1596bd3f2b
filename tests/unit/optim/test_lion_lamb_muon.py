"""Tests of Lion, Lamb and Muon against their written-out formulas, and that parameters do not affect each other."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.base.errors import ConfigError, ModelError
from windlass.optim import Lamb, Lion, Muon, muon_groups
from windlass.optim.lamb import trust_ratio
from windlass.optim.muon import NS_COEFFICIENTS, orthogonalize

SHAPES = [(5, 7), (7, 5), (6,), (), (3, 2, 2), (4, 4)]
STEPS = 5


def make_parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def gradients(seed: int = 1) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).double() for shape in SHAPES] for _ in range(STEPS)]


def close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.detach().double(), reference.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion_equals_the_paper(decay: float) -> None:
    lr, b1, b2 = 0.01, 0.8, 0.95
    parameters = make_parameters()
    weights = [p.detach().double() for p in parameters]
    momenta = [torch.zeros_like(w) for w in weights]
    train(Lion(parameters, lr=lr, betas=(b1, b2), weight_decay=decay), parameters)
    for grads in gradients():
        for i, g in enumerate(grads):
            direction = torch.sign(b1 * momenta[i] + (1 - b1) * g)
            weights[i] = weights[i] - lr * (direction + decay * weights[i])
            momenta[i] = b2 * momenta[i] + (1 - b2) * g
    close(parameters, weights)


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("least", "most"), [(0.01, 10.0), (0.9, 1.1)])
def test_lamb_equals_its_formula(bias_correction: bool, inside: bool, least: float, most: float) -> None:
    lr, b1, b2, eps, decay = 0.02, 0.85, 0.97, 1e-3, 0.1
    parameters = make_parameters()
    weights = [p.detach().double() for p in parameters]
    m = [torch.zeros_like(w) for w in weights]
    v = [torch.zeros_like(w) for w in weights]
    optimizer = Lamb(parameters, lr, bias_correction, (b1, b2), eps, inside, decay, max_coeff=most, min_coeff=least)
    train(optimizer, parameters)
    for t, grads in enumerate(gradients(), start=1):
        for i, g in enumerate(grads):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            u = m[i] / ((v[i] + eps) ** 0.5 if inside else v[i] ** 0.5 + eps) + decay * weights[i]
            ratio = (weights[i].pow(2).sum() / u.pow(2).sum()).sqrt().item()
            ratio = min(max(ratio, least), most)
            size = lr * math.sqrt(1 - b2**t) / (1 - b1**t) if bias_correction else lr
            weights[i] = weights[i] - size * ratio * u
    close(parameters, weights)


def test_lamb_ratio_is_one_where_a_norm_is_zero() -> None:
    zero = torch.zeros(3, requires_grad=True)
    zero.grad = torch.ones(3)
    Lamb([zero], lr=0.1, bias_correction=False, betas=(0.0, 0.0)).step()
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.1))
    still = torch.ones(3, requires_grad=True)
    still.grad = torch.zeros(3)
    Lamb([still], lr=0.1).step()
    assert torch.equal(still.detach(), torch.ones(3))
    for weight, update, ratio in (
        (0.0, 1.0, 1.0),
        (1.0, 0.0, 1.0),
        (0.0, 0.0, 1.0),
        (1.0, 2.0, 0.5),
        (1.0, 1e-9, 10.0),
    ):
        result = trust_ratio(torch.full((3,), weight), torch.full((3,), update), least=0.01, most=10.0)
        assert result.item() == pytest.approx(ratio)


@pytest.mark.parametrize("settings", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}])
def test_muon_equals_torch_muon_on_matrices_and_adamw_elsewhere(settings: dict[str, object]) -> None:
    ours, theirs = make_parameters(), make_parameters()
    train(Muon(ours, lr=0.02, weight_decay=0.2, **settings), ours)  # type: ignore[arg-type]
    # A parameter of three dimensions is a stack of matrices.
    parts = [[nn.Parameter(m.clone()) for m in p.detach()] if p.ndim == 3 else [p] for p in theirs]
    matrices, others = [[p for of_one in parts for p in of_one if (p.ndim > 1) == wide] for wide in (True, False)]
    muon: torch.optim.Optimizer = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.2, **settings)  # type: ignore[arg-type]
    adamw = torch.optim.AdamW(others, lr=0.02, weight_decay=0.2)
    for grads in gradients():
        for of_one, grad in zip(parts, grads, strict=True):
            for parameter, its_grad in zip(of_one, grad if len(of_one) > 1 else [grad], strict=True):
                parameter.grad = its_grad.float().view_as(parameter)
        for optimizer in (muon, adamw):
            optimizer.step()
    for our, of_one in zip(ours, parts, strict=True):
        difference = our.detach() - torch.stack([their.detach() for their in of_one]).view_as(our)
        # Products of stacks, and products that are widened to fp32, round differently in bf16.
        rounds_alike = our.ndim < 3 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert difference.abs().max() <= (0.0 if rounds_alike else 2e-3)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 16)])
def test_orthogonalize_is_the_same_iteration_with_products_in_fp32(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr("windlass.optim.muon._product_dtype", lambda device, dtype=dtype: dtype)
        results.append(orthogonalize(matrix, NS_COEFFICIENTS, 5))
    assert results[0].dtype == results[1].dtype == torch.bfloat16
    torch.testing.assert_close(results[0], results[1], rtol=0.0, atol=0.02)


def test_orthogonalize_multiplies_no_bf16_matrices_on_a_cpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    seen = []

    class RecordProducts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm"):
                seen.append({argument.dtype for argument in args})
            return func(*args, **(kwargs or {}))

    with RecordProducts():
        orthogonalize(torch.randn(8, 12), NS_COEFFICIENTS, 2)
    assert seen == [{torch.float32}] * 6


def test_orthogonalize_keeps_singular_vectors_and_equalizes_singular_values() -> None:
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    result = orthogonalize(matrix, (3.4445, -4.7750, 2.0315), 5)
    assert torch.equal(matrix, before)
    assert result.dtype == torch.bfloat16
    values = torch.linalg.svdvals(result.float())
    assert values.min() > 0.5 and values.max() < 1.5
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    middle = u.T @ result.float() @ vh.T
    assert (middle - middle.diagonal().diag()).abs().max() < 0.03


def test_muon_splits_groups_and_gives_each_kind_its_rate() -> None:
    parameters = make_parameters()
    parameters[1].use_muon = False  # type: ignore[attr-defined]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:3]},
        {"params": parameters[3:5], "lr": 0.5},
        {"params": parameters[5:], "use_muon": False},
    ]
    optimizer = Muon(groups, lr=0.1, muon_lr=0.2, adam_lr=0.3)
    results = [(g["use_muon"], g["lr"], [tuple(p.shape) for p in g["params"]]) for g in optimizer.param_groups]
    assert results == [
        (True, 0.2, [(5, 7)]),
        (False, 0.3, [(7, 5), (6,)]),
        (True, 0.5, [(3, 2, 2)]),
        (False, 0.5, [()]),
        (False, 0.3, [(4, 4)]),
    ]
    rebuilt = Muon([dict(group) for group in optimizer.param_groups])
    assert [g["lr"] for g in rebuilt.param_groups] == [g["lr"] for g in optimizer.param_groups]


def test_muon_marks_embeddings_heads_and_ties_as_outer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 3))
            self.lm_head = nn.Linear(4, 10, bias=False)
            self.side = nn.Linear(4, 10, bias=False)
            self.tied = nn.Linear(4, 10, bias=False)
            self.tied.weight = self.embed.weight
            self.block[0].bias.requires_grad_(False)

        def get_output_embeddings(self) -> nn.Module:
            return self.side

    model = Model()
    hidden, others = muon_groups(model)
    assert hidden["use_muon"] is True and others["use_muon"] is False
    assert {id(p) for p in hidden["params"]} == {id(model.block[0].weight), id(model.block[2].weight)}
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for p in hidden["params"] + others["params"]} == trainable
    named = dict(model.named_parameters())
    head, inner = named["lm_head.weight"], named["block.0.weight"]
    head.use_muon, inner.use_muon = True, False  # type: ignore[attr-defined]
    marked = muon_groups(model, [inner, head])
    assert [group["params"][0] is head for group in marked] == [True, False]


@pytest.mark.parametrize("cls", [Lion, Lamb, Muon])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_of_a_parameter_is_independent_of_the_others(cls: type, dtype: torch.dtype) -> None:
    together, alone = make_parameters(dtype=dtype), make_parameters(dtype=dtype)
    optimizers = [cls([p], lr=0.01, weight_decay=0.1) for p in alone]
    joint = cls(together, lr=0.01, weight_decay=0.1)
    for grads in gradients():
        for i, grad in enumerate(grads):
            together[i].grad = grad.to(dtype)
            alone[i].grad = grad.to(dtype)
            optimizers[i].step()
        joint.step()
    for p, q in zip(together, alone, strict=True):
        assert p.dtype == dtype
        assert torch.equal(p, q)


@pytest.mark.parametrize("cls", [Lion, Lamb, Muon])
def test_state_round_trips_and_parameters_without_gradient_are_skipped(cls: type) -> None:
    parameters = make_parameters()
    optimizer = cls(parameters, lr=0.01, weight_decay=0.1)
    train(optimizer, parameters)
    twins = [p.detach().clone().requires_grad_() for p in parameters]
    other = cls(twins, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, parameters, seed=2)
    train(other, twins, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(parameters, twins, strict=True))
    before = [p.detach().clone() for p in parameters]
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))


def test_a_state_dict_of_deepspeeds_lamb_is_loaded() -> None:
    """Its groups have no `eps_inside_sqrt`, an attribute of DeepSpeed's optimizer, and its step counts are numbers."""
    parameters, twins = make_parameters(), make_parameters()
    optimizer, other = (Lamb(own, lr=0.01, eps=0.1, eps_inside_sqrt=True) for own in (parameters, twins))
    train(optimizer, parameters)
    train(other, twins)
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["eps_inside_sqrt"]
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    other.load_state_dict(saved)
    train(optimizer, parameters, seed=2)
    train(other, twins, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(parameters, twins, strict=True))


@pytest.mark.parametrize("cls", [Lion, Lamb, Muon])
def test_copied_optimizer_accepts_more_groups(cls: type) -> None:
    optimizer = copy.deepcopy(cls(make_parameters()))
    count = len(optimizer.param_groups)
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    assert len(optimizer.param_groups) == count + 1


@pytest.mark.parametrize("cls", [Lion, Lamb, Muon])
def test_a_closure_is_evaluated_with_gradients(cls: type) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    optimizer = cls([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        torch.autograd.backward(loss)
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert not torch.equal(weight.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("cls", [Lion, Lamb, Muon])
def test_sparse_gradients_are_refused_by_name(cls: type) -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(ModelError, match=f"{cls.__name__}.*\\(3, 2\\).*sparse"):
        cls([weight]).step()


def test_a_flattened_matrix_is_refused() -> None:
    span = torch.zeros(6, requires_grad=True)
    optimizer = Muon([torch.zeros(2, 3, requires_grad=True)])
    optimizer.param_groups[0]["params"] = [span]
    span.grad = torch.zeros(6)
    with pytest.raises(ModelError, match="pass the gradient of the full matrix"):
        optimizer.step()


@pytest.mark.parametrize(
    ("cls", "settings", "word"),
    [
        (Lion, {"lr": -1.0}, "Lion: lr is -1.0"),
        (Lion, {"betas": (0.9, 1.0)}, "betas"),
        (Lamb, {"amsgrad": True}, "amsgrad"),
        (Lamb, {"max_grad_norm": 1.0}, "gradient_clipping"),
        (Lamb, {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff"),
        (Lamb, {"eps": -1.0}, "Lamb: eps is -1.0"),
        (Muon, {"muon_lr": -1.0}, "Muon: muon_lr is -1.0"),
        (Muon, {"adjust_lr_fn": "mine"}, "mine"),
        (Muon, {"ns_steps": 100}, "ns_steps"),
    ],
)
def test_bad_values_are_refused(cls: type, settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        cls(make_parameters(), **settings)


def test_muon_refuses_vectors_marked_as_matrices() -> None:
    vector = torch.zeros(3, requires_grad=True)
    with pytest.raises(ConfigError, match=r"\(3,\)"):
        Muon([{"params": [vector], "use_muon": True}])
    vector.use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"\(3,\)"):
        Muon([vector])


@pytest.mark.parametrize("cls", [Lion, Lamb, Muon])
def test_empty_parameter_is_updated(cls: type) -> None:
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 0), (0,), (2, 2))]
    optimizer = cls(weights, lr=0.1)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weights[2], torch.ones(2, 2))
