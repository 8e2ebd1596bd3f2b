"""Names of transforms: pictures are made as they are to be."""

from __future__ import annotations


def Compose(*arguments: object, **named: object) -> None:
    """Nothing."""


ToTensor = Normalize = Resize = CenterCrop = Compose
