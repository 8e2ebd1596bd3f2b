"""Choice of the replica for a prompt: the longest cached prefix and the least load."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

BLOCK_CHARACTERS = 64
"""Characters in a block of a prompt: about the text of one KV block of 16 tokens."""

_MAX_BLOCKS = 4096
_MAX_ENTRIES = 2**16
# A running answer delays a new one about as much as a prompt of this length.
_RUNNING_CHARACTERS = 64


def routing_text(data: Any) -> str:
    """Return the text by which a request is routed. Prompts with a common prefix have texts with a common prefix.

    Args:
        data: JSON object of a request. Anything else gives an empty text: the replica then answers with the error.
    """
    if not isinstance(data, dict):
        return ""
    model = str(data.get("model"))
    prompt = data.get("prompt", data.get("input"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return f"{model}\n{data.get('instructions') or ''}\n{prompt}"
    if isinstance(prompt, list) and not any(isinstance(one, dict) for one in prompt[:1]):
        return f"{model}\n{' '.join(map(str, prompt[: _MAX_BLOCKS * BLOCK_CHARACTERS]))}"
    messages = data.get("messages", prompt)
    if not isinstance(messages, list):
        return model
    tools = json.dumps(data["tools"]) if data.get("tools") else ""
    if data.get("instructions"):
        tools = f"{tools}\n{data['instructions']}"
    return "\n".join([model, tools, *(_message_text(message) for message in messages)])


def _message_text(message: Any) -> str:
    if isinstance(message, dict) and isinstance(message.get("content"), str):
        return f"{message.get('role')}\n{message['content']}"
    return json.dumps(message)


def block_hashes(text: str) -> list[int]:
    """Return the hash of each prefix of `text` that consists of full blocks, from short to long; at most
    4096 hashes."""
    hashes: list[int] = []
    known = 0
    for start in range(0, min(len(text) // BLOCK_CHARACTERS, _MAX_BLOCKS) * BLOCK_CHARACTERS, BLOCK_CHARACTERS):
        known = hash((known, text[start : start + BLOCK_CHARACTERS]))
        hashes.append(known)
    return hashes


class ReplicaLoad:
    """Prefixes that one replica has computed, and its current load.

    A set of hashes represents the trie of known prefixes, because the hash of a prefix depends on all of its blocks.

    Attributes:
        running: number of requests in progress.
        prefill: number of uncached characters of prompts without an answer yet.
    """

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self.running = 0
        self.prefill = 0
        self._max_entries = max_entries
        self._hashes: OrderedDict[int, None] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Number of blocks of known prefixes."""
        return len(self._hashes)

    def count_cached(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks that were sent to the replica before."""
        for count, known in enumerate(hashes):
            if known not in self._hashes:
                return count
        return len(hashes)

    def insert(self, hashes: Iterable[int]) -> None:
        """Add the prefixes of a prompt. Beyond a fixed number, the least recently used prefixes are dropped."""
        # add long prefixes first, so that short prefixes, without which the long ones are unreachable, are dropped last
        for known in reversed(list(hashes)):
            self._hashes[known] = None
            self._hashes.move_to_end(known)
        while len(self._hashes) > self._max_entries:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """Drop all prefixes, because the replica's process has ended."""
        self._hashes.clear()


def choose_replica(loads: Sequence[ReplicaLoad], length: int, hashes: Sequence[int]) -> tuple[int, int]:
    """Return the index of the replica that can begin the answer first, and the number of characters that it has to
    compute.

    The cost of a replica is the number of characters that are computed before the first token: the waiting
    prompts, the part of this prompt that is not cached there, and `_RUNNING_CHARACTERS` for each running answer. Among
    equal costs the replica with the fewest requests is chosen, then the one with the fewest cached blocks, so that
    conversations are distributed.

    Raises:
        ValueError: `loads` is empty.
    """
    best: tuple[int, int, int, int, int] | None = None
    for index, load in enumerate(loads):
        own = length - load.count_cached(hashes) * BLOCK_CHARACTERS
        rank = (load.prefill + own + load.running * _RUNNING_CHARACTERS, load.running, load.num_blocks, index, own)
        best = rank if best is None else min(best, rank)
    if best is None:
        raise ValueError("there is no replica to choose from")
    return best[3], best[4]
