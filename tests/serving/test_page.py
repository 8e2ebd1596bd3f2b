"""Tests of the browser page: it is one file, its CSP allows only its own script and style, and a browser can use it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.headless_browser import DevTools, open_page
from tests.serving.fake_engine import FakeEngine
from tests.serving.harness import WAIT_SECONDS, client_of, server_on_thread


def test_the_page_has_no_other_files_and_its_policy_covers_its_parts() -> None:
    answer = client_of(FakeEngine()).get("/")
    page, policy = answer.text, answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=(?!\"data:,\")", page) and not re.search(r"https?://", page)
    assert not re.search(r"\son\w+=|\sstyle=", page)  # inline handlers and styles, which the policy would block
    for tag in ("script", "style"):
        parts = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", page, re.S)
        assert len(parts) == 1
        digest = base64.b64encode(hashlib.sha256(parts[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy


@pytest.mark.peer
@pytest.mark.parametrize("mode", ["text", "chat"])
def test_a_browser_shows_the_answer_its_speed_and_the_cache(mode: str, tmp_path: Path) -> None:
    """Needs Chromium in PATH. Saves a picture of the page in `tmp_path`."""
    with server_on_thread(FakeEngine(step_seconds=0.01)) as address:
        found = asyncio.run(_use_page(address, mode, tmp_path))
    expected = "hello" * 12 if mode == "text" else ("<user>hello<assistant>" * 3)[:60]
    assert found["answer"] == expected[:60] and found["error"] == ""
    assert found["count"] == "60" and float(found["speed"]) > 10 and found["first"].endswith(" ms")
    assert found["usage"].endswith(" %") and found["cached"].startswith("0 of ")
    assert found["problems"] == []


async def _use_page(address: str, mode: str, folder: Path) -> dict[str, Any]:
    """Type a prompt, send it, and return the texts of the page by the ids of their elements."""
    async with open_page(f"{address}/", folder, seconds=WAIT_SECONDS) as tools:
        return await _drive(tools, mode, folder)


async def _drive(tools: DevTools, mode: str, folder: Path) -> dict[str, Any]:
    while await tools.value("document.querySelectorAll('#model option').length") != 1:
        await asyncio.sleep(0.05)
    await tools.value(f"at('mode').value = '{mode}'; at('tokens').value = 60")
    await tools.value("at('prompt').focus()")
    await tools.call("Input.insertText", text="hello")
    await tools.value("at('send').click()")
    while not await tools.value("!at('send').disabled && at('count').textContent === '60'"):
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.1)  # the load is shown once a second
    await tools.save_picture(folder / "page.png")
    names = ("answer", "error", "count", "speed", "first", "usage", "cached", "load")
    found: dict[str, Any] = {name: await tools.value(f"at('{name}').textContent") for name in names}
    return {**found, "problems": tools.problems}
