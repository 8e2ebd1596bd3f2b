"""Factors of the equivalence law and their valid combinations, for the covering array and the full product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.dist.equivalence_runs import SGD, Setting, adamw, specimen
from tests.hf_models import HF_ZOO
from tests.models import ZOO
from tests.oracle import Recipe

TINY_BUCKETS = (("reduce_bucket_size", 600), ("allgather_bucket_size", 500))
# sizes that give a larger model as many buckets as TINY_BUCKETS gives a small one
SMALL_BUCKETS = (("reduce_bucket_size", 60_000), ("allgather_bucket_size", 50_000))
FROZEN_KNOBS = (
    ("stage3_prefetch_bucket_size", 0),
    ("stage3_max_live_parameters", 0),
    ("stage3_max_reuse_distance", 0),
)

FACTORS: Mapping[str, Sequence[Any]] = {
    "model": list(ZOO),
    "stage": [3, 2, 1, 0],
    "ranks": [2, 3, 4, 1],
    "optimizer": ["SGD", "AdamW"],
    "accumulation": [1, 3],
    "precision": ["fp32", "bf16"],
    "overlap": [True, False],
    "plain_backward": [False, True],
    "transport": ["shm", "gloo"],
    "clipping": [1.0, 0.1, 0.0],
    "buckets": ["default", "tiny"],
    "persistence": [0, 300, 100_000],
    "knobs": ["default", "frozen", "merged"],
}
HF_FACTORS: Mapping[str, Sequence[Any]] = {**FACTORS, "model": list(HF_ZOO), "ranks": [2, 3]}


def allowed(row: dict[str, Any]) -> bool:
    """Return True if the (partial) row is a valid case. Rules whose factors are missing do not apply."""
    if "model" not in row:
        return True
    traits = specimen(row["model"]).traits
    if "fp32" in traits and row.get("precision") == "bf16":
        return False
    return not ("once" in traits and row.get("accumulation", 1) > 1)


def allowed_quick(row: dict[str, Any]) -> bool:
    """Return True if the (partial) row is a case of `make test`.

    Each model trains at stage 3 and one other stage. A model of `ZOO` trains on two ranks and one other number of
    ranks, and with two of three values of clipping, persistence and knobs; its place in `ZOO` selects them. Models of
    transformers train with all values on two ranks, and llama also on three. `make parity` has all cases.
    """
    if not allowed(row) or "model" not in row:
        return allowed(row)
    if row["model"] in HF_ZOO:
        number = list(HF_ZOO).index(row["model"])
        return row.get("stage", 3) in (3, 2 - number) and (row.get("ranks", 2) == 2 or row["model"] == "llama")
    number = list(ZOO).index(row["model"])
    quick = {
        "stage": (3, number % 3),
        "ranks": (2, (4, 3, 1, 3, 3)[number % 5]),
        "clipping": _but_one("clipping", number // 3),
        "persistence": _but_one("persistence", number // 9),
        "knobs": _but_one("knobs", number + number // 3),
    }
    return all(row[name] in values for name, values in quick.items() if name in row)


def _but_one(factor: str, number: int) -> list[Any]:
    """Return all values of a factor but one; `number` chooses the omitted one."""
    values = FACTORS[factor]
    return [value for place, value in enumerate(values) if place != number % len(values)]


def recipe_of(row: dict[str, Any], steps: int = 5) -> Recipe:
    """Return the recipe of the row: ranks, accumulation, precision, optimizer and clipping."""
    return Recipe(
        ranks=row["ranks"],
        accumulation=row["accumulation"],
        precision=row["precision"],
        optimizer=row["optimizer"],
        optimizer_params=SGD if row["optimizer"] == "SGD" else adamw(specimen(row["model"]), row["precision"]),
        clipping=row["clipping"],
        steps=steps,
    )


def setting_of(row: dict[str, Any]) -> Setting:
    """Return the engine setting of the row."""
    zero: tuple[tuple[str, Any], ...] = ()
    if row["buckets"] == "tiny":
        zero = SMALL_BUCKETS if row["model"] == "four_blocks" else TINY_BUCKETS
    zero += {"default": (), "frozen": FROZEN_KNOBS, "merged": (("unit_merge_threshold", 1000),)}[row["knobs"]]
    return Setting(
        stage=row["stage"],
        overlap=row["overlap"],
        plain_backward=row["plain_backward"],
        persistence=row["persistence"],
        transport=row["transport"],
        zero=zero,
    )


def name_of(row: dict[str, Any]) -> str:
    """Return a test id that names every factor."""
    words = [
        row["model"],
        f"stage{row['stage']}",
        f"w{row['ranks']}",
        f"a{row['accumulation']}",
        row["precision"],
        row["optimizer"],
        row["transport"],
        "plain" if row["plain_backward"] else "engine",
        "overlap" if row["overlap"] else "serial",
        f"clip{row['clipping']}",
        row["buckets"],
        f"persist{row['persistence']}",
        row["knobs"],
    ]
    return "-".join(words)
