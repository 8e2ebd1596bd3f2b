"""Full product of mesh axes: every axis and pair of axes, at every stage, on device and host, for each model.

Each model has tied and untied embeddings; only mixtral has the axis `ep`. Single cases have meshes of three axes, and
numbers of ranks that are not a power of two.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.dist.parallel_runs import Case, check

AXES = [("tp", ""), ("pp", ""), ("sp", "ulysses"), ("sp", "ring"), ("ep", "")]
ALONE = [(axis,) for axis in AXES]
PAIRS = [pair for pair in combinations(AXES, 2) if pair[0][0] != pair[1][0]]


def _cases() -> list[Case]:
    cases = []
    for axes in (*ALONE, *PAIRS):
        names = tuple((axis, 2) for axis, _ in axes)
        kinds = [kind for _, kind in axes if kind]
        for model in ("llama", "gpt2", "mixtral"):
            if ("ep", 2) in names and model != "mixtral":
                continue
            for stage in range(4):
                for host in (False, True):
                    for tied in (False, True):
                        more = 2 if ("pp", 2) in names else 1
                        cases.append(
                            Case(model, names, stage, host, tied, kinds[0] if kinds else "ulysses", accumulation=more)
                        )
    return cases


MORE = [
    Case("llama", (("pp", 2), ("sp", 2), ("tp", 2)), stage=3, accumulation=2),
    Case("gpt2", (("pp", 2), ("sp", 2), ("tp", 2)), stage=1, accumulation=2, tied=True, sequence="ring"),
    Case("mixtral", (("pp", 2), ("ep", 2), ("tp", 2)), stage=2, accumulation=2, host=True),
    Case("mixtral", (("ep", 2), ("sp", 2), ("tp", 2)), stage=3),
    Case("llama", (("pp", 2), ("tp", 2)), stage=3, accumulation=2, world=8, under_init=True),
    Case("llama", (("pp", 3),), stage=2, accumulation=3),
    Case("uneven", (("tp", 3),), stage=3),
    Case("llama", (("sp", 3),), stage=3, sequence="ring"),
    Case("llama", (("sp", 3),), stage=2),
    Case("mixtral", (("ep", 2),), stage=3, world=6),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*_cases(), *MORE], ids=str)
def test_layouts_train_as_one_process(case: Case) -> None:
    check(case)
