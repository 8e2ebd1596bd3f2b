"""Tests of budgets: the knapsack against all choices, measured losses against whole forwards, and errors."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.causal_models import build
from tests.tiny_causal_configs import make_tiny_model
from windlass.base.errors import ConfigError
from windlass.compress import format_choice, format_speed
from windlass.compress.budget_choice import BUDGET_FORMATS, choose_for_budget
from windlass.compress.compression_budget import CompressionBudget, parse_budget, parse_shares
from windlass.compress.format_choice import FormatLimits, FormatOption, UnmetLimitError, choose_formats, total
from windlass.compress.layer_sensitivity import SensitivityMeter, mean_nats, rounded_weight, sample_tokens
from windlass.compress.model_directory import ModelDirectory
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.token_times import TokenTimes
from windlass.kernels.weight_format import get_weight_format


def random_groups(seed: int, groups: int = 6) -> list[list[FormatOption]]:
    draw = random.Random(seed)
    return [
        [
            FormatOption(str(bits), bits * draw.randint(90, 110), draw.random() / bits, bits * draw.uniform(0.5, 2))
            for bits in (2, 3, 4, 8)
        ]
        for _ in range(groups)
    ]


def all_choices(groups: list[list[FormatOption]]) -> list[tuple[float, float, float]]:
    return [
        (sum(one.nbytes for one in options), sum(one.loss for one in options), sum(one.seconds for one in options))
        for options in itertools.product(*groups)
    ]


def solved(groups: list[list[FormatOption]], resource: str, **limits: Any) -> float:
    """Return the total of `resource` for the best choice. It must be within the limits and reported as the optimum."""
    found = choose_formats(groups, FormatLimits(**limits))
    assert found.gap == 0
    for name, limit in limits.items():
        assert total(groups, found.places, name) <= limit * (1 + 1e-12)
    return total(groups, found.places, resource)


@pytest.mark.parametrize("seed", range(4))
def test_the_knapsack_is_the_best_of_all_choices(seed: int) -> None:
    groups = random_groups(seed)
    every = all_choices(groups)
    ascending = [sorted(one[resource] for one in every) for resource in range(3)]
    for share in (0.05, 0.2, 0.5, 0.8):
        nbytes, loss, seconds = (one[int(share * len(every))] for one in ascending)
        best = min(one[1] for one in every if one[0] <= nbytes)
        assert solved(groups, "loss", nbytes=int(nbytes)) == pytest.approx(best, rel=1e-12)
        assert solved(groups, "nbytes", loss=loss) == min(one[0] for one in every if one[1] <= loss)
        best = min(one[1] for one in every if one[2] <= seconds)
        assert solved(groups, "loss", seconds=seconds) == pytest.approx(best, rel=1e-12)
        nearest = min(one[2] for one in every if one[0] <= nbytes)
        for seconds in (
            nearest * 0.999,
            nearest,
            *(ascending[2][int(at * len(every))] for at in (0.05, 0.2, 0.5, 0.8)),
        ):
            within = [one[1] for one in every if one[0] <= nbytes and one[2] <= seconds]
            if within:
                found = solved(groups, "loss", nbytes=int(nbytes), seconds=seconds)
                assert found == pytest.approx(min(within), rel=1e-12), (share, seconds)
                continue
            with pytest.raises(UnmetLimitError) as raised:
                choose_formats(groups, FormatLimits(nbytes=int(nbytes), seconds=seconds))
            assert raised.value.resource == "seconds" and raised.value.nearest == pytest.approx(nearest)
            assert total(groups, raised.value.places, "seconds") == raised.value.nearest
    with pytest.raises(UnmetLimitError) as raised:
        choose_formats(groups, FormatLimits(nbytes=10))
    assert raised.value.nearest == ascending[0][0]


def test_gap_bounds_the_error_of_a_truncated_search(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = random_groups(5)
    limits = FormatLimits(nbytes=2600, seconds=30.0)
    best = choose_formats(groups, limits)
    monkeypatch.setattr(format_choice, "_MOST_SUMS", 3)
    found = choose_formats(groups, limits)
    excess = total(groups, found.places, "loss") - total(groups, best.places, "loss")
    assert best.gap == 0 <= excess <= found.gap < total(groups, found.places, "loss") and found.gap > 0


def test_a_model_of_many_equal_layers_is_solved_exactly() -> None:
    groups = []
    for layer in range(48):
        scale = 1 + layer % 7
        groups.append([FormatOption(str(bits), bits * 590_000, scale / 4**bits, bits * 1e-5) for bits in (3, 4, 8)])
    # Layers have equal sizes, so the most sensitive ones get the most bits: only the numbers of layers at 8 and at 4
    # bits are tried.
    losses = sorted((1 + layer % 7 for layer in range(48)), reverse=True)
    for limits in ({"nbytes": 48 * 4 * 590_000}, {"nbytes": 48 * 4 * 590_000, "seconds": 190e-5}):
        most = int(limits["nbytes"] / 590_000) if len(limits) == 1 else 190
        best = min(
            sum(losses[:wide]) / 4**8 + sum(losses[wide : wide + four]) / 4**4 + sum(losses[wide + four :]) / 4**3
            for wide in range(49)
            for four in range(49 - wide)
            if 8 * wide + 4 * four + 3 * (48 - wide - four) <= most
        )
        assert solved(groups, "loss", **limits) == pytest.approx(best, rel=1e-12)


def test_budgets_are_read_and_refused() -> None:
    assert parse_budget("size=4x") == CompressionBudget(size=0.25) == parse_budget("size=25%")
    assert parse_budget("size=0.3,loss=+0.02,speed=2.0") == CompressionBudget(size=0.3, loss=0.02, speed=2.0)
    assert parse_budget("loss=1%") == CompressionBudget(loss=0.01, is_relative=True)
    assert parse_budget("latency=2ms").latency == pytest.approx(0.002)
    for wrong in ("size", "bytes=3", "size=-1", "loss=x", "latency=2", "size=1.2", "size=4x,size=3x", "speed=0"):
        with pytest.raises(ConfigError, match=r"budget \(--budget\)"):
            parse_budget(wrong)
    assert parse_shares("heads=0.25, layers=4") == {"heads": 0.25, "layers": 4}
    with pytest.raises(ConfigError, match=r"prune \(--prune\) has 'heads'"):
        parse_shares("heads")
    for text in ("heads=0", "heads=nan", "ffn=-1", "heads=0.2,heads=0.3"):
        with pytest.raises(ConfigError, match=r"prune \(--prune\) has"):
            parse_shares(text)


def save_llama(folder: Path, layers: int) -> Any:
    model = build("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=layers).eval()
    model.save_pretrained(folder)
    return model, ModelDirectory(folder)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_llama(tmp_path_factory.mktemp("budget") / "wide", 3)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model with so many layers that a single one takes less than 2 % of the time."""
    return save_llama(tmp_path_factory.mktemp("budget") / "deep", 8)


BATCHES = [torch.arange(32).view(2, 16) + shift for shift in (3, 7)]


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_measured_losses_are_those_of_whole_forwards(name: str) -> None:
    model: Any = build(name, num_hidden_layers=3).eval()
    meter = SensitivityMeter(model, BATCHES)
    assert [group.block for group in meter.groups] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    found = meter.sensitivities(["int4_g32"])
    before = [model(batch, use_cache=False).logits.detach().log_softmax(-1) for batch in BATCHES]
    for group, losses in zip(meter.groups[3::4], found[3::4], strict=True):
        for layer in group.names:
            weight = model.get_submodule(layer).weight
            saved = weight.data
            weight.data = rounded_weight(saved, "int4_g32")
            after = [model(batch, use_cache=False).logits.detach().log_softmax(-1) for batch in BATCHES]
            weight.data = saved
        wanted = sum(float((b.exp() * (b - a)).sum()) for b, a in zip(before, after, strict=True)) / 64
        assert losses["int4_g32"] == pytest.approx(wanted, rel=1e-3, abs=1e-7)
    meter.limit_time(6, 0.0)
    assert meter.tokens == 64 and torch.isfinite(torch.tensor(meter.divergence({})))


@pytest.mark.parametrize("name", ["gemma4_text", "zamba2", "cpmant"])
def test_blocks_that_need_earlier_ones_are_measured_in_whole_forwards(name: str) -> None:
    model: Any = make_tiny_model(name)
    meter = SensitivityMeter(model, BATCHES)
    group = next(group for group in reversed(meter.groups) if "shared" in group.names[0] or name != "zamba2")
    assert group.block == -1
    formats = dict.fromkeys(group.names, "int2_g32")
    before = [model(batch, use_cache=False).logits.detach().log_softmax(-1) for batch in BATCHES]
    for layer in group.names:
        weight = model.get_submodule(layer).weight
        weight.data = meter._rounded_weight(layer, weight.data, "int2_g32")
    after = [model(batch, use_cache=False).logits.detach().log_softmax(-1) for batch in BATCHES]
    wanted = sum(float((b.exp() * (b - a)).sum()) for b, a in zip(before, after, strict=True)) / 64
    found = SensitivityMeter(make_tiny_model(name), BATCHES).divergence(formats, group.block)
    assert found == pytest.approx(wanted, rel=1e-3) and found > 0


def choose(wide: Any, budget: str, **options: Any) -> Any:
    model, directory = wide
    return choose_for_budget(model, directory, BATCHES, parse_budget(budget), bits_per_nat=0.5, **options)


def whole_loss(model: Any, formats: dict[str, str]) -> float:
    """Return the divergence, in bits per byte, of forwards with rounded layers from those of the float model."""

    def run() -> list[torch.Tensor]:
        return [model(batch, use_cache=False).logits.detach().log_softmax(-1) for batch in BATCHES]

    before, saved = run(), {name: model.get_submodule(name).weight.data for name in formats}
    for name, form in formats.items():
        model.get_submodule(name).weight.data = rounded_weight(saved[name], form)
    after = run()
    for name, weight in saved.items():
        model.get_submodule(name).weight.data = weight
    return 0.5 * sum(float((b.exp() * (b - a)).sum()) for b, a in zip(before, after, strict=True)) / 64


def test_a_size_is_met_and_no_uniform_choice_is_better(wide: Any) -> None:
    model, directory = wide
    before = sum(p.numel() * 4 for p in model.parameters())
    for size in (0.3, 0.27):
        found = choose(wide, f"size={size}")
        assert 0.98 * size * before <= found.nbytes <= size * before and found.tokens == 64
        assert found.loss == pytest.approx(whole_loss(model, found.formats), rel=1e-3)
        packed = {name for one in found.groups for name in one.names}
        shapes = [directory.places[f"{name}.weight"].shape for name in packed]
        rest = before - sum(4 * rows * columns for rows, columns in shapes)
        uniform = {}
        for name in BUDGET_FORMATS:
            forms = [get_weight_format(name).file_form(*shape) for shape in shapes]
            if rest + sum(part.nbytes for form in forms for part in form.values()) <= found.nbytes:
                uniform[name] = whole_loss(model, dict.fromkeys(packed, name))
        assert found.uniform is not None and found.uniform[0] in uniform
        assert min(uniform.values()) == pytest.approx(found.uniform[1], rel=1e-3)
        assert found.loss <= (1 + 1e-3) * min(uniform.values())
    assert found.loss < 0.9 * min(uniform.values()), "the smaller size needs several formats"
    assert len({one.format for one in found.groups}) > 1
    with pytest.raises(ConfigError, match=r"size=0\.05 cannot be met: the nearest is size=0\.\d+ \(\d\.\d+x\)"):
        choose(wide, "size=0.05")


def test_a_choice_stays_within_the_limit_of_loss(wide: Any) -> None:
    bits = 0.5 * mean_nats(wide[0], sample_tokens(wide[0], BATCHES))
    plain = [wide[0](row[None], labels=row[None]).loss.item() for batch in BATCHES for row in batch]
    assert bits == pytest.approx(0.5 * sum(plain) / len(plain), rel=1e-4)
    loose, tight = choose(wide, "loss=2%"), choose(wide, "loss=+0.002")
    assert loose.loss <= 0.02 * bits and tight.loss <= 0.002 and loose.nbytes < tight.nbytes
    with pytest.raises(ConfigError, match=r"loss=\+0\.0001 cannot be met: the nearest is loss=\+0\.\d+ bits per byte"):
        choose(wide, "size=0.27,loss=+0.0001")


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_choice_within_a_loss_limit_has_the_fewest_bytes(
    wide: Any, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a choice is not the sum of its groups' losses, but `factor` times that sum."""
    losses: dict[str, float] = {}

    def sensitivities(self: Any, formats: Any, progress: Any) -> list[dict[str, float]]:
        losses.update({group.names[0]: 0.001 * (3 + 7 * n % 11) for n, group in enumerate(self.groups)})
        return [{"int4_g32": losses[group.names[0]]} for group in self.groups]

    def divergence(self: Any, formats: Any) -> float:
        return factor * sum(loss for name, loss in losses.items() if formats[name] is not None)

    monkeypatch.setattr(SensitivityMeter, "sensitivities", sensitivities)
    monkeypatch.setattr(SensitivityMeter, "divergence", divergence)
    packed = choose(wide, "loss=+9", formats=("int4_g32",))
    rest = packed.nbytes - sum(one.nbytes for one in packed.groups)
    for limit in (0.005, 0.0123, 0.02):
        found = choose(wide, f"loss=+{limit}", formats=("int4_g32",))
        best = min(
            sum(one.nbytes if taken else one.wide_bytes for one, taken in zip(packed.groups, chosen, strict=True))
            for chosen in itertools.product((False, True), repeat=len(packed.groups))
            if factor * sum(one.loss for one, taken in zip(packed.groups, chosen, strict=True) if taken) <= limit
        )
        assert found.nbytes == rest + best and found.loss <= limit


def test_uniform_formats_are_measured_before_a_budget_is_refused(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def sensitivities(self: Any, formats: Any, progress: Any) -> list[dict[str, float]]:
        return [{name: 0.001 if name == "int4_g32" else 0.0009 for name in formats} for _ in self.groups]

    monkeypatch.setattr(SensitivityMeter, "sensitivities", sensitivities)

    def divergence(self: Any, formats: Any) -> float:
        return 0.01 if set(formats.values()) == {"int4_g32"} else 0.09

    monkeypatch.setattr(SensitivityMeter, "divergence", divergence)
    found = choose(wide, "size=0.5,loss=+0.02")
    assert set(found.formats.values()) == {"int4_g32"} and found.loss == pytest.approx(0.005)
    with pytest.raises(ConfigError, match=r"loss=\+0\.004 cannot be met: the nearest is loss=\+0\.0050 bits"):
        choose(wide, "size=0.5,loss=+0.004")


class Machine:
    """Machine with times from formulas. A product takes longer in the whole model than alone, most of all at few bits.

    Attributes:
        timed: formats of the models that were timed.
    """

    def __init__(self, wide: Any) -> None:
        self.sizes = {n: m.weight.numel() for n, m in wide[0].named_modules() if type(m) is torch.nn.Linear}
        self.timed: list[dict[str, str]] = []

    def product(self, rows: int, columns: int, name: str) -> float:
        return rows * columns * (32 if name == "fp32" else int(name[3])) * 1e-10

    def whole(self, formats: dict[str, str]) -> float:
        found = 1e-4
        for name, size in self.sizes.items():
            form = formats.get(name, "fp32")
            found += 1.3 * self.product(size, 1, form) * (1.0 if form == "fp32" else 8 / int(form[3]) ** 0.5)
        return found

    def token(self, formats: dict[str, str]) -> float:
        self.timed.append(formats)
        return self.whole(formats)


@pytest.mark.parametrize(("budget", "ratio"), [("speed", 1.25), ("latency", 1.15), ("latency", 1.35)])
def test_a_speed_is_met_as_the_whole_model_measures_it(deep: Any, budget: str, ratio: float) -> None:
    machine = Machine(deep)
    before = machine.whole({})
    times = TokenTimes(before, machine.whole(dict.fromkeys(machine.sizes, "int4_g128")))
    token = before / ratio
    asked = f"speed={ratio}" if budget == "speed" else f"latency={1e3 * token:.9f}ms"
    losses = [{name: 2.0 ** -float(name[3]) * (1 + n % 5) for name in BUDGET_FORMATS} for n in range(32)]
    given: dict[str, Any] = {"times": times, "measure": machine.product, "losses": lambda compute: losses}
    predicted = choose(deep, asked, **given)
    assert abs(machine.whole(predicted.formats) / token - 1) > 0.02, "the prediction is not enough"
    found = choose(deep, asked, time_formats=machine.token, **given)
    assert found.seconds == machine.whole(found.formats) and 0.98 * token <= found.seconds <= 1.02 * token
    assert 1 < len(machine.timed) <= 5 and machine.timed[0] == predicted.formats and found.formats in machine.timed


def test_a_speed_that_is_missed_names_the_measured_nearest(wide: Any) -> None:
    machine = Machine(wide)
    times = TokenTimes(machine.whole({}), machine.whole(dict.fromkeys(machine.sizes, "int4_g128")))
    given: dict[str, Any] = {"times": times, "measure": machine.product}
    with pytest.raises(ConfigError, match=r"speed=9 cannot be met: the nearest is latency=[\d.]+ms, speed=[\d.]+; "):
        choose(wide, "speed=9", **given)
    with pytest.raises(ConfigError) as raised:
        choose(wide, "speed=9", time_formats=machine.token, **given)
    timed = [set(formats.values()) for formats in machine.timed]
    assert sorted(timed, key=str) == sorted(({name} for name in BUDGET_FORMATS), key=str), "each uniform format once"
    fastest = min(machine.timed, key=machine.whole)
    assert f"the nearest is latency={1e3 * machine.whole(fastest):.3g}ms" in str(raised.value)


def test_measured_speed_overrides_the_predicted_one(wide: Any) -> None:
    machine = Machine(wide)
    given: dict[str, Any] = {"times": TokenTimes(1.0, 0.5), "measure": machine.product}
    # In a prediction, all products together take at most the time of a token.
    with pytest.raises(ConfigError, match=r"speed=1000 cannot be met"):
        choose(wide, "speed=1000", **given)
    found = choose(wide, "speed=1000", time_formats=lambda formats: 1e-3 * 1.015, **given)
    assert found.seconds == 1e-3 * 1.015 and set(found.formats.values()) <= {"int3_g64", "int3_g128"}
    with pytest.raises(ConfigError, match=r"speed=1000 cannot be met: the nearest is latency=1.03ms, speed=971; "):
        choose(wide, "speed=1000", time_formats=lambda formats: 1e-3 * 1.03, **given)


def test_nearest_time_is_that_of_a_choice_within_the_size(wide: Any) -> None:
    def is_fast(name: str | None) -> bool:
        return name == "int8"  # the fastest format has too many bytes

    given: dict[str, Any] = {
        "times": TokenTimes(1.0, 0.5),
        "measure": lambda rows, columns, name: rows * columns * (1e-10 if is_fast(name) else 1e-9),
        "time_formats": lambda formats: 1e-3 if all(map(is_fast, formats.values())) else 5e-3,
    }
    with pytest.raises(ConfigError, match=r"speed=1000 cannot be met: the nearest is latency=5ms, speed=200; "):
        choose(wide, "size=0.25,speed=1000", **given)


def test_the_tighter_limit_of_time_is_the_one_that_is_refused(wide: Any) -> None:
    given: dict[str, Any] = {"times": TokenTimes(1.0, 0.5), "measure": Machine(wide).product}
    given["time_formats"] = lambda formats: 0.4
    with pytest.raises(ConfigError, match=r"latency=300ms cannot be met: the nearest is latency=400ms, speed=2\.5; "):
        choose(wide, "speed=2,latency=300ms", **given)
    with pytest.raises(ConfigError, match=r"speed=5 cannot be met: the nearest is latency=400ms, speed=2\.5; "):
        choose(wide, "speed=5,latency=300ms", **given)


@pytest.mark.parametrize(("name", "quantizes"), [("int4_g32", True), ("int8", True), ("int8_g32", False)])
def test_the_time_of_a_product_is_measured(name: str, quantizes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the time of one product in the fastest round. Each product of a round has its own weight copy."""
    now, multiplied = [0.0], []
    plain = format_speed.packed_linear

    def product(x: torch.Tensor, panels: Any) -> torch.Tensor:
        multiplied.append(panels)
        now[0] += 0.25 if 64 < len(multiplied) <= 128 else 0.5  # the second round is the fastest
        return plain(x, panels)

    monkeypatch.setattr(format_speed, "packed_linear", product)
    assert format_speed.measure_product(32, 64, name, clock=lambda: now[0]) == 0.25
    assert len({id(panels) for panels in multiplied}) == 64
    assert all(panels.quantize_inputs == quantizes and panels.out_features == 32 for panels in multiplied)


def test_chosen_formats_name_layers_of_the_directory(tmp_path: Path, wide: Any) -> None:
    found = choose(wide, "size=0.3")
    assert set(found.formats) <= {name.removesuffix(".weight") for name in wide[1].places}
    assert sum(one.nbytes for one in found.groups) < found.nbytes


def test_a_stored_copy_of_a_tied_head_counts_unquantized(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300}
    model: Any = build("llama", tie_word_embeddings=True, **sizes).eval()
    model.save_pretrained(tmp_path / "wide")
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    found = choose((model, ModelDirectory(tmp_path / "wide")), "size=0.46", head=True)
    report = write_packed_directory(tmp_path / "wide", tmp_path / "packed", found.formats.get)
    assert report.bytes_after == found.nbytes <= 0.46 * report.bytes_before
