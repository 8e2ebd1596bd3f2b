"""Stand-in for torchvision's picture files, which are not written."""

from __future__ import annotations

from typing import Any


def save_image(picture: Any, path: str, normalize: bool) -> None:
    """Do nothing."""
