"""Full product behind tests/dist/test_elastic_resume.py: every layout resumes in every other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.elastic_runs import LAYOUTS, Layout, Row, hold

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", LAYOUTS, ids=lambda layout: f"{layout.ranks}-{layout.stage}-{layout.tier}")
def test_checkpoint_resumes_on_any_layout(first: Layout, transport: str, tmp_path: Any) -> None:
    first = replace(first, transport=transport)
    hold([Row(first, replace(second, transport=transport), "tied") for second in LAYOUTS], tmp_path)
