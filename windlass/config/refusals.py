"""What a configuration asks for that is not done here: one list of sentences, gathered from the whole schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from windlass.config import composition, optimizer, scheduler
from windlass.config.problems import Refusal
from windlass.config.section import Section
from windlass.config.verdict import Verdict, facts_of

if TYPE_CHECKING:
    from windlass.config.root import Config

MUST_BE_FILLED = ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled")


def refusals_of(config: Config) -> list[Refusal]:
    """Every refusal in `config`, in the order of the schema."""
    found = list(_walk(config, ""))
    if config.optimizer:
        found += optimizer.parameter_refusals(config.optimizer)
    if config.scheduler:
        found += scheduler.parameter_refusals(config.scheduler)
    for key in MUST_BE_FILLED:
        if key in config.autos:
            found.append(Refusal(key, "auto", "nobody filled it in; write true or false"))
    for pair in composition.refused(composition.describe(config)):
        axes, values = zip(pair.first, pair.second, strict=True)
        found.append(Refusal(" with ".join(axes), " with ".join(values), pair.because))
    return found


def _walk(section: Section, path: str) -> Iterator[Refusal]:
    if section.refusal:
        asked = section.asked_for()
        if asked is not None:
            yield Refusal(".".join(part for part in (path, asked) if part), section.at(asked), section.refusal)
        return
    if section.switch and section.asked_for() is None:
        return
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        inner = f"{path}.{name}" if path else name
        if isinstance(value, Section):
            yield from _walk(value, inner)
            continue
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Section):
                yield from _walk(item, f"{inner}[{index}]")
        facts = facts_of(field)
        if facts["verdict"] == Verdict.REFUSED and value != field.get_default(call_default_factory=True):
            yield Refusal(inner, value, facts["because"])
