"""Text of a FLOP profile in the layout of DeepSpeed's report, and functions for its number formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from windlass.observe.flop_profile import ModelProfile, ModuleProfile

_SCALES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6))
_LABEL_WIDTH = 72
_TITLE = "windlass Flops Profiler"


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number with a unit prefix: `1.5 G`. `units` is the prefix; by default the largest that fits."""
    if units is None:
        units, scale = next(((u, s) for u, s in _SCALES if abs(num) >= s), ("", 1.0) if num == 0 else _SCALES[-1])
    else:
        scale = dict(_SCALES).get(units, 1.0)
    return f"{round(num / scale, precision)} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Format multiply-accumulates: `1.5 GMACs`."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Format operations a second: `1.5 TFLOPS`."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Format a number of parameters: `1.5 B`, `336.23 M`."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Format seconds: `1.5 ms`."""
    return f"{number_to_string(duration, units, precision)}s"


@dataclass(frozen=True)
class StepFacts:
    """Facts of the profiled step that the profile of a micro-batch lacks.

    Attributes:
        step: number of the step.
        world_size, data_size, model_size: number of ranks; of ranks with different samples; of ranks that share each
            sample.
        micro_batch: samples of a micro-batch on one rank.
        samples: samples of the step over all ranks.
        forward_seconds: seconds of one micro-batch's forward; None: the forward time of the profile.
        backward_seconds: seconds of one micro-batch's backward; None if the engine did not run the backward.
        step_seconds: seconds of the update.
        micro_batches: micro-batches of the step.
        recompute_factor: number of forwards that the backward repeats, used in place of the counted recomputation; 0:
            use the count.
        peak: description of the device's peak FLOPS and of the share that the step reached.
    """

    step: int = 1
    world_size: int = 1
    data_size: int = 1
    model_size: int = 1
    micro_batch: int | None = None
    samples: int | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    step_seconds: float | None = None
    micro_batches: int = 1
    recompute_factor: float = 0.0
    peak: str = ""


@dataclass(frozen=True)
class ReportOptions:
    """Parts of the report.

    Attributes:
        module_depth: depth of the aggregated profile; below 0: every depth.
        top_modules: number of module classes shown at each depth.
        detailed: print every module.
    """

    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    facts: StepFacts = field(default_factory=StepFacts)


def report_lines(profile: ModelProfile, options: ReportOptions) -> Iterator[str]:
    """Yield the lines of the report."""
    yield ""
    yield _ruled(_TITLE, 26)
    yield f"Profile Summary at step {options.facts.step}:"
    yield from _notations()
    yield ""
    for label, value in _summary_rows(profile, options.facts):
        yield f"{label + ':':<{_LABEL_WIDTH}}{value}"
    if profile.uncounted:
        yield f"not counted, since they have no formula: {', '.join(profile.uncounted)}; give them one with"
        yield "torch.utils.flop_counter.register_flop_formula"
    yield from aggregated_lines(profile, options.module_depth, options.top_modules)
    if options.detailed:
        yield from detailed_lines(profile)
    yield "-" * 78


def aggregated_lines(profile: ModelProfile, module_depth: int = -1, top_modules: int = 1) -> Iterator[str]:
    """Yield, for `module_depth` (below 0: for each depth), the module classes with most parameters, MACs and time."""
    by_depth: list[dict[str, list[float]]] = []
    for depth, module in profile.root.walk():
        while len(by_depth) <= depth:
            by_depth.append({})
        sums = by_depth[depth].setdefault(module.class_name, [0, 0, 0])
        for index, value in enumerate((module.parameters, module.macs, module.seconds)):
            sums[index] += value
    yield ""
    yield _ruled("Aggregated Profile per GPU", 29)
    deepest = len(by_depth) - 1
    shown = (
        range(deepest + 1) if module_depth < 0 else range(min(module_depth, deepest), min(module_depth, deepest) + 1)
    )
    yield f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"
    for depth in shown:
        yield f"depth {depth}:"
        for index, (label, show) in enumerate(_COLUMNS):
            ranked = sorted(by_depth[depth].items(), key=lambda item: -item[1][index])[: max(0, top_modules)]
            yield f"    {label:<11} - { {name: show(sums[index]) for name, sums in ranked} }"


_COLUMNS = (("params", params_to_string), ("MACs", macs_to_string), ("fwd latency", duration_to_string))


def detailed_lines(profile: ModelProfile) -> Iterator[str]:
    """Yield every module with its figures, nested as torch prints a model."""
    yield ""
    yield _ruled("Detailed Profile per GPU", 30)
    yield "After the name of each module:"
    yield "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd"
    yield "latency, fwd FLOPS, bwd flops, recomputed flops"
    yield "A container has the sums of its children. What a module computes itself is in its figures, and not below it."
    yield ""
    yield from _module_lines(profile.root, profile.root, "", "")


def _module_lines(module: ModuleProfile, total: ModuleProfile, label: str, indent: str) -> Iterator[str]:
    figures = [
        params_to_string(module.parameters),
        f"{_share(module.parameters, total.parameters)} Params",
        macs_to_string(module.macs),
        f"{_share(module.macs, total.macs)} MACs",
        duration_to_string(module.seconds),
        f"{_share(module.seconds, total.seconds)} latency",
        flops_to_string(module.forward / module.seconds if module.seconds else 0.0),
    ]
    if total.backward:
        figures.append(f"bwd {number_to_string(module.backward).strip()}")
    if module.recomputed:
        figures.append(f"recomputed {number_to_string(module.recomputed).strip()}")
    words = ", ".join([*figures, *([module.extra] if module.extra else [])])
    if not module.children:
        yield f"{indent}{label}{module.class_name}({words})"
        return
    yield f"{indent}{label}{module.class_name}("
    yield f"{indent}  {words}"
    for key, child in module.children.items():
        yield from _module_lines(child, total, f"({key}): ", indent + "  ")
    yield f"{indent})"


def _notations() -> Iterator[str]:
    yield "Notations:"
    yield "data parallel size (dp_size), model parallel size (mp_size: ranks that share each sample),"
    yield "parameters (params), multiply-accumulate operations (MACs), floating-point operations of products,"
    yield "convolutions and attention (flops), the same a second (FLOPS), time of forward, backward and update"
    yield "(fwd, bwd and step latency), of all three (iter latency)"


def _summary_rows(profile: ModelProfile, facts: StepFacts) -> Iterator[tuple[str, str]]:
    root = profile.root
    forward_seconds = root.seconds if facts.forward_seconds is None else facts.forward_seconds
    recomputed = facts.recompute_factor * root.forward if facts.recompute_factor else float(root.recomputed)
    yield "world size", str(facts.world_size)
    yield "data parallel size", str(facts.data_size)
    yield "model parallel size", str(facts.model_size)
    if facts.micro_batch is not None:
        yield "batch size per GPU", str(facts.micro_batch)
    yield "params per GPU", params_to_string(root.parameters)
    yield "params of model = params per GPU * mp_size", params_to_string(profile.model_parameters)
    yield "fwd MACs per GPU", macs_to_string(root.macs)
    yield "fwd flops per GPU", number_to_string(root.forward)
    yield "fwd flops of model = fwd flops per GPU * mp_size", number_to_string(root.forward * facts.model_size)
    if root.backward:
        yield "bwd flops per GPU", number_to_string(root.backward)
        yield "recomputed flops per GPU", number_to_string(recomputed)
    yield "fwd latency", duration_to_string(forward_seconds)
    if facts.backward_seconds:
        yield "bwd latency", duration_to_string(facts.backward_seconds)
    if forward_seconds:
        yield "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", flops_to_string(root.forward / forward_seconds)
    if facts.backward_seconds:
        work, both = root.backward + recomputed, forward_seconds + facts.backward_seconds
        yield (
            "bwd FLOPS per GPU = (bwd + recomputed) flops per GPU / bwd latency",
            flops_to_string(work / facts.backward_seconds),
        )
        yield (
            "fwd+bwd FLOPS per GPU = all flops per GPU / (fwd+bwd latency)",
            flops_to_string((root.forward + work) / both),
        )
        if facts.step_seconds is not None:
            yield "step latency", duration_to_string(facts.step_seconds)
            iteration = facts.micro_batches * both + facts.step_seconds
            yield "iter latency", duration_to_string(iteration)
            if facts.samples:
                yield "samples/second", number_to_string(facts.samples / iteration).strip()
    if facts.peak:
        yield "peak FLOPS per GPU, share in use", facts.peak


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0.0:.2f}%"


def _ruled(title: str, width: int) -> str:
    return f"{'-' * width} {title} {'-' * width}"
