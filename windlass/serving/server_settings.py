"""Settings of the server, validated before a model is loaded."""

from __future__ import annotations

import codecs
import hashlib
import hmac
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from windlass.base.bounded_input import read_bounded
from windlass.base.errors import ConfigError

ToolCallFormat = Literal["auto", "hermes", "llama3_json", "none"]
"""Form of the tool calls in the model's text."""

TOOL_CALL_FORMATS: tuple[str, ...] = get_args(ToolCallFormat)

_MAX_KEY_FILE_BYTES = 2**20


class ApiKeys:
    """API keys, compared in constant time.

    Only SHA-256 digests are stored, so that the time of a comparison does not depend on the lengths of keys.
    """

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Read one key a line; empty lines and those that begin with # are left out.

        Raises:
            ConfigError: the file is too large, is not UTF-8, or has no key.
            OSError: the file cannot be read.
        """
        data = read_bounded(path, _MAX_KEY_FILE_BYTES)
        if data is None:
            raise ConfigError(f"--api-key-file {path} is larger than {_MAX_KEY_FILE_BYTES:,} bytes; give a smaller one")
        try:
            lines = [line.strip() for line in data.removeprefix(codecs.BOM_UTF8).decode().splitlines()]
        except UnicodeDecodeError as error:
            raise ConfigError(f"--api-key-file {path} is not UTF-8 at byte {error.start}") from error
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigError(f"--api-key-file {path} has no key; write one on each line")
        return cls(keys)

    def accept(self, key: bytes) -> bool:
        """Return True if the server accepts the key. The comparison takes the same time for all keys of the server.

        Args:
            key: bytes that the client sent, which are compared with the keys in UTF-8.
        """
        digest = hashlib.sha256(key).digest()
        found = False
        for expected in self._digests:
            found |= hmac.compare_digest(digest, expected)
        return found


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        model_names: names under which the model is served; the first is the one in answers to requests without `model`,
            and in metrics.
        max_body_bytes: largest number of bytes of a request's body.
        max_prompts: largest number of prompts in a request.
        max_output_tokens: largest number of tokens of an answer; None: the context window is the only limit.
        drain_timeout: seconds that running requests get after SIGTERM.
        tool_calls: form of the tool calls in the model's text; "auto" recognizes hermes' and Llama's.
        chat_template: chat template in Jinja; None: that of the tokenizer.
        allowed_origins: web pages of these origins may use the server from a browser.
        api_keys: API keys; each request needs one of them. None: requests need no key.
        engine_index: label of the engine in the metrics.

    Raises:
        ConfigError: a value is out of range.
    """

    model_names: tuple[str, ...]
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 256
    max_output_tokens: int | None = None
    drain_timeout: float = 30.0
    tool_calls: str = "auto"
    chat_template: str | None = None
    allowed_origins: tuple[str, ...] = ()
    api_keys: ApiKeys | None = field(default=None, compare=False)
    engine_index: int = 0

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("--served-model-name is empty; give a name")
        for name, lowest in (("max_body_bytes", 1024), ("max_prompts", 1), ("drain_timeout", 0)):
            if not getattr(self, name) >= lowest:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is {getattr(self, name)}; write at least {lowest}")
        if self.tool_calls not in TOOL_CALL_FORMATS:
            raise ConfigError(f"--tool-calls is {self.tool_calls!r}; write one of {', '.join(TOOL_CALL_FORMATS)}")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ConfigError(f"--max-output-tokens is {self.max_output_tokens}; write at least 1")
