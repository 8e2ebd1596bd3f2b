"""Tests that a saved and resumed run equals the uninterrupted one, for slots on any tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import oracle
from tests.custom_optimizers import Foreign
from tests.dist.equivalence_runs import ADAMW, Setting, ds_config, specimen, whole_params
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_offload import LATE, PLACES, offload_to
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_num_steps": 6}}
SMALL = (("sub_group_size", 100),)  # parameters span several chunks, and chunks hold parts of several parameters
FOLDER = "FOLDER"  # replaced by the test's own folder


def at(stage: int, state: str = "none", param: str = "none", *more: tuple[str, Any], **optimizer: Any) -> Setting:
    """Return a setting with these tiers."""
    return Setting(stage=stage, zero=(*offload_to(state, param, FOLDER, **optimizer), *more))


class Counting(Foreign):
    """Client's elementwise optimizer with a counter that is a plain number."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["count"] = state.get("count", 0) + 1
        state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(gradient, 0.1)
        p.sub_(state["mean"] / (1 - 0.9 ** state["count"]), alpha=lr)


class Rows(Foreign):
    """Client's optimizer whose state is neither elementwise nor per parameter: one norm per row."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        flat = gradient.reshape(-1, p.shape[-1] if p.dim() else 1)
        state["rows"] = state.get("rows", torch.zeros(flat.shape[0], 1)).lerp(flat.norm(dim=1, keepdim=True), 0.5)
        p.sub_((flat / (1e-3 + state["rows"])).view(p.shape), alpha=lr)


def optimizer(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes an optimizer as clients pass it."""
    import windlass

    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "counting": Counting,
        "rows": Rows,
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
        "lamb 8bit": lambda params: windlass.optim.CPULamb(params, lr=1e-2, state_dtype="8bit"),
    }
    for bits in ("fp32", "bf16", "8bit"):
        made[f"adam {bits}"] = lambda params, bits=bits: windlass.optim.CPUAdam(params, lr=1e-2, state_dtype=bits)
    return made[kind]


@dataclass(frozen=True)
class Case:
    """Trained model, and the tiers of the save and of the load.

    Attributes:
        client: argument of `optimizer`, whose result replaces the recipe's optimizer; empty: the recipe's.
        other_client: `client` of the second run; empty: the same.
        trained: the second engine takes a step before it loads, so that it has states to replace.
        steps: number of steps before the save; one more step follows.
    """

    first: Setting
    second: Setting
    recipe: Recipe = Recipe(optimizer="AdamW", optimizer_params=ADAMW)
    name: str = "mlp"
    client: str = ""
    other_client: str = ""
    trained: bool = False
    steps: int = 2

    @property
    def same(self) -> bool:
        """Return True if the second run has to bitwise equal the first one."""
        return self.first == self.second and self.client == (self.other_client or self.client)


def engine_for(case: Case, setting: Setting, client: str, seed: int, folder: str) -> Any:
    import windlass

    zero = tuple(
        (key, {k: folder if v == FOLDER else v for k, v in value.items()} if isinstance(value, dict) else value)
        for key, value in setting.zero
    )
    config = {**ds_config(case.recipe, replace(setting, zero=zero)), "scheduler": SCHEDULE}
    if case.recipe.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2}
    more = {}
    if client:
        del config["optimizer"], config["scheduler"]
        more["optimizer"] = optimizer(client)
    model = oracle.build(specimen(case.name), seed + dist.get_rank())
    return windlass.initialize(model=model, config=config, **more)[0]


def steps(engine: Any, case: Case, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for micro in range(case.recipe.accumulation):
            batch = cast(specimen(case.name).batch(Place(step, micro, dist.get_rank())), case.recipe.dtype)
            losses.append(float(specimen(case.name).train(engine, batch, engine.backward)))
            engine.step()
    return losses


def snapshot(engine: Any) -> dict[str, Any]:
    """Return full masters and optimizer states, and all counters."""
    from windlass.zero.access.full_values import full_states

    results: dict[str, Any] = {f"param {name}": value for name, value in whole_params(engine.module).items()}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            results |= {f"{key} {name}": torch.as_tensor(value) for key, value in full_states(parameter).items()}
    results["counts"] = torch.tensor([engine.global_steps, engine.micro_steps, engine.loss_scale(), *engine.get_lr()])
    return results


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names whose values differ in any bit between two snapshots."""
    names = [name for name in a if name not in b or not torch.equal(a[name], b[name])]
    return names + [name for name in b if name not in a]


def save_and_continue(case: Case, folder: str) -> dict[str, Any]:
    """Train, save, and train one step more."""
    engine = engine_for(case, case.first, case.client, 0, folder)
    steps(engine, case, 0, case.steps)
    engine.save_checkpoint(folder)
    saved = snapshot(engine)
    losses = steps(engine, case, 2, 3)
    after = snapshot(engine)
    engine.destroy()
    return {"saved": saved, "losses": losses, "after": after}


def load_and_continue(case: Case, folder: str) -> dict[str, Any]:
    """Load into another engine with other weights and train the last step."""
    engine = engine_for(case, case.second, case.other_client or case.client, 50, folder)
    if case.trained:
        steps(engine, case, 7, 8)
    engine.load_checkpoint(folder)
    loaded = snapshot(engine)
    losses = steps(engine, case, 2, 3)
    after = snapshot(engine)
    engine.destroy()
    return {"saved": loaded, "losses": losses, "after": after}


def complaints(case: Case, wanted: dict[str, Any], found: dict[str, Any], *, same_ranks: bool = True) -> list[str]:
    text = [f"loaded: {name}" for name in differences(wanted["saved"], found["saved"])]
    if case.same and same_ranks:
        text += [f"after: {name}" for name in differences(wanted["after"], found["after"])]
        if wanted["losses"] != found["losses"]:
            text.append(f"losses {wanted['losses']} and {found['losses']}")
    elif case.recipe.precision == "fp32" and same_ranks:
        params = [{k: v for k, v in item["after"].items() if k.startswith("param")} for item in (wanted, found)]
        error, where = relative_error(params[1], params[0])
        if not error <= 1e-5:
            text.append(f"after: {where} off by {error:.1e}")
    return text


def in_turn(cases: list[Case], folder: str) -> list[str]:
    """Run every case on these ranks. Return all differences."""
    text = []
    for number, case in enumerate(cases):
        place = f"{folder}/{number}"
        try:
            result = complaints(case, save_and_continue(case, place), load_and_continue(case, place))
        except Exception as error:
            error.add_note(f"under {case}")
            raise
        text += [f"{case}: {', '.join(result[:4])}"] if result else []
    return text


def hold(cases: list[Case], ranks: int, transport: str, folder: Any, env: dict[str, str] = LATE) -> None:
    for text in run_ranks(
        in_turn, ranks, cases, str(folder), env=env, transport=transport, timeout=120.0 + 30 * len(cases)
    ):
        assert not text, "\n".join(text[:8])


SAME = [
    at(1, "cpu"),
    at(2, "nvme", "none", *SMALL),
    at(3, "cpu", "cpu"),
    at(3, "nvme", "nvme", *SMALL),
    at(3, "nvme", "none", gradient_device="nvme"),
    at(3, "cpu", "none", ratio=0.5),
]


@pytest.mark.parametrize(("ranks", "transport"), [*PLACES[:2], pytest.param(*PLACES[2], marks=pytest.mark.slow)])
def test_resumes_bitwise_on_the_same_tiers(ranks: int, transport: str, tmp_path: Any) -> None:
    # the slow `test_every_tier_resumes_on_every_other` runs every pair of tiers in each of `PLACES`
    settings = SAME[::2] if ranks == 2 and transport == "gloo" else SAME[1::2]
    cases = [Case(item, item, name="unused_by_step", trained=n % 2 == 0) for n, item in enumerate(settings)]
    # this checkpoint has no states: no state of the second engine may remain
    cases.append(Case(settings[-1], settings[-1], trained=True, steps=0))
    hold(cases, ranks, transport, tmp_path)


ACROSS = [
    (at(3), at(3, "nvme", "nvme", *SMALL)),
    (at(3, "nvme", "nvme", *SMALL), at(1, "cpu")),
    (at(2, "cpu"), at(3, "nvme", "cpu", ratio=0.5)),
    (at(1, "nvme"), at(2)),
]


@in_shares
def test_resumes_on_other_tiers_and_stages(every: bool, tmp_path: Any) -> None:
    """See `elastic_runs` for all pairs of tiers and stages."""
    hold([Case(item, other, trained=True) for item, other in share(ACROSS, 0, 2, every)], 2, "shm", tmp_path)


@in_shares
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resumes_in_16_bits(precision: str, every: bool, tmp_path: Any) -> None:
    recipe = Recipe(precision=precision, optimizer="AdamW", optimizer_params=ADAMW)
    both = at(3, "nvme", "nvme", *SMALL)
    cases = [Case(both, both, recipe, "lora"), Case(at(2, "cpu"), both, recipe)]
    hold(share(cases, precision == "fp16", 2, every), 2, "gloo", tmp_path)


OPTIMIZERS: list[dict[str, Any]] = [
    {"recipe": Recipe(optimizer="SGD", optimizer_params=(("lr", 0.05), ("momentum", 0.9)))},
    {"recipe": Recipe(optimizer="Lion", optimizer_params=(("lr", 1e-3),))},
    {"recipe": Recipe(optimizer="Lamb", optimizer_params=(("lr", 1e-2),))},
    {"recipe": Recipe(optimizer="Adagrad", optimizer_params=(("lr", 1e-2),))},
    {"recipe": Recipe(optimizer="Muon", optimizer_params=(("lr", 1e-2),))},
    {"client": "counting", "name": "tied"},
    {"client": "rows", "name": "tied"},
    {"client": "adafactor"},
    {"client": "adam fp32"},
    {"client": "adam bf16"},
    {"client": "adam 8bit"},
    {"client": "lamb 8bit"},
]


def with_optimizers(settings: list[Setting], second: Setting | None = None) -> list[Case]:
    """Return a case for each optimizer, with the settings in turn."""
    results = []
    for number, what in enumerate(OPTIMIZERS):
        item = settings[number % len(settings)]
        results.append(Case(item, second or item, trained=number % 3 == 0, **what))
    return results


@in_shares
def test_any_optimizer_resumes(every: bool, tmp_path: Any) -> None:
    """`make test` runs one optimizer for each kind of state."""
    kinds = ("SGD", "Lamb", "Muon", "counting", "rows", "adam bf16", "lamb 8bit")
    cases = with_optimizers([at(2, "cpu", "none", *SMALL), at(3, "nvme", "nvme", *SMALL)])
    hold([case for case in cases if every or (case.client or case.recipe.optimizer) in kinds], 2, "gloo", tmp_path)


@pytest.mark.slow
def test_any_optimizer_resumes_on_other_tiers(transport: str, tmp_path: Any) -> None:
    cases = with_optimizers([at(2), at(1, "nvme", "none", *SMALL)], at(3, "nvme", "cpu", *SMALL))
    hold([case for case in cases if "8bit" not in case.client], 2, transport, tmp_path)


def close(wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the names that differ by more than half an 8-bit quantization step. Only moments may differ."""
    text = [name for name in wanted if name not in found or found[name].shape != wanted[name].shape]
    for name in wanted.keys() - text:
        a, b = wanted[name].double(), found[name].double()
        moment = name.startswith("exp_avg")
        most = a.abs() / 16 * 1.001 + a.abs().max() * 2.0**-14 if moment else 0.0 * a
        text += [name] if bool(((a - b).abs() > most).any()) else []
    return text + [name for name in found if name not in wanted]


def recoded(cases: list[Case], folder: str) -> list[tuple[list[str], list[str]]]:
    """Load each case in another sharding or format. Return names of values not bitwise equal, and not `close`."""
    results = []
    for number, case in enumerate(cases):
        place = f"{folder}/{number}"
        expected, loaded = save_and_continue(case, place)["saved"], load_and_continue(case, place)["saved"]
        expected.pop("counts"), loaded.pop("counts")
        results.append((differences(expected, loaded), close(expected, loaded)))
    return results


@in_shares
def test_8_bit_states_are_resharded_and_converted(every: bool, tmp_path: Any) -> None:
    item, other = at(2, "cpu"), at(3, "nvme", "nvme", *SMALL)
    cases = [
        Case(item, other, client="adam 8bit", trained=True),
        Case(other, item, client="adam fp32", other_client="adam 8bit"),
        Case(other, item, client="adam 8bit", other_client="adam fp32", trained=True),
        Case(item, other, client="adam 8bit", other_client="adamw"),
        Case(item, at(1), client="lamb 8bit"),
    ]
    exact = [True, False, True, True, True]
    if not every:  # without the loads into 32-bit states
        cases, exact = [cases[0], cases[1], cases[4]], [True, False, True]
    for result in run_ranks(recoded, 2, cases, str(tmp_path), env=LATE, transport="gloo", timeout=240):
        assert [not_close for _, not_close in result] == [[]] * len(cases)
        # decoding is exact, and so is coding in other blocks: scales are powers of two
        assert [not not_same for not_same, _ in result] == exact


def through_a_state_dict(case: Case, folder: str) -> list[str]:
    """Return the names of states that are not `close` after a plain state dict was moved between engines."""
    engine = engine_for(case, case.first, case.client, 0, folder)
    steps(engine, case, 0, 2)
    expected, state = snapshot(engine), engine.optimizer.state_dict()
    engine.destroy()
    other = engine_for(case, case.second, case.client, 0, folder)
    steps(other, case, 0, 1)
    other.optimizer.load_state_dict(state)
    actual = snapshot(other)
    other.destroy()
    moments = [{k: v for k, v in item.items() if not k.startswith(("param", "counts"))} for item in (expected, actual)]
    dtypes = {entry["exp_avg"].dtype for entry in state["state"].values()}
    keys = {key for entry in state["state"].values() for key in entry}
    assert dtypes == {torch.float32} and keys == {"step", "exp_avg", "exp_avg_sq"}
    return close(*moments)


def test_8_bit_states_in_a_plain_state_dict(tmp_path: Any) -> None:
    case = Case(at(2, "cpu"), at(3, "nvme", "none", *SMALL), client="adam 8bit")
    for text in run_ranks(through_a_state_dict, 2, case, str(tmp_path), env=LATE, transport="gloo"):
        assert not text


def saved_while_parked(folder: str) -> str:
    case = Case(at(2), at(2))
    engine = engine_for(case, case.first, "", 0, folder)
    steps(engine, case, 0, 1)
    engine.offload_states()
    text = ""
    try:
        engine.save_checkpoint(folder)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    engine.reload_states()
    engine.save_checkpoint(folder)
    engine.destroy()
    return text


def test_offloaded_states_are_not_saved(tmp_path: Any) -> None:
    (text,) = run_ranks(saved_while_parked, 1, str(tmp_path), env=LATE)
    assert text == "ModelError: save_checkpoint: states are offloaded; call engine.reload_states() first"


def each(take: Callable[[Case, str], dict[str, Any]], cases: list[Case], folder: str) -> list[dict[str, Any]]:
    return [take(case, f"{folder}/{number}") for number, case in enumerate(cases)]


def across_ranks(cases: list[Case], before: int, after: int, folder: Any) -> None:
    """Save on `before` ranks and load on `after`: masters and states are bitwise equal."""
    expected = run_ranks(each, before, save_and_continue, cases, str(folder), env=LATE, timeout=240)[0]
    actual = run_ranks(each, after, load_and_continue, cases, str(folder), env=LATE, timeout=240)[0]
    for case, item, other in zip(cases, expected, actual, strict=True):
        reported = complaints(case, item, other, same_ranks=False)
        assert not reported, f"{case}: {reported[:4]}"


WORLDS: list[dict[str, Any]] = [
    {"name": "unused_by_step"},
    {"client": "rows", "name": "tied"},
    {"client": "adam bf16"},
    {"recipe": Recipe(precision="bf16", optimizer="AdamW", optimizer_params=ADAMW)},
]


@in_shares
@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), (2, 1), pytest.param(2, 4, marks=pytest.mark.slow)],
    ids=["1 to 2", "2 to 1", "2 to 4"],
)
def test_resumes_on_other_ranks(before: int, after: int, every: bool, tmp_path: Any) -> None:
    small = at(3, "nvme", "nvme", *SMALL)
    there = [Case(small, at(2, "cpu"), **what) for what in WORLDS[::2]]
    back = [Case(at(1, "cpu"), small, **what) for what in WORLDS[1::2]]
    across_ranks([*share(there, before, 2, every), *share(back, before, 2, every)], before, after, tmp_path)


EVERY = [*SAME, at(1, "nvme"), at(2, "cpu"), at(3), at(3, "nvme", "cpu"), at(3, "cpu", "nvme"), at(1), at(2)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "transport"), PLACES)
@pytest.mark.parametrize("number", range(len(EVERY)))
def test_every_tier_resumes_on_every_other(number: int, ranks: int, transport: str, tmp_path: Any) -> None:
    cases = [Case(EVERY[number], other, trained=(number + n) % 2 == 0) for n, other in enumerate(EVERY)]
    hold(cases, ranks, transport, tmp_path)
