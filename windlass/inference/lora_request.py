"""LoRA adapter that a request uses, with the main fields of vLLM's `LoRARequest`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoRARequest:
    """LoRA adapter that is loaded at its first use.

    Attributes:
        lora_name: name of the adapter.
        lora_int_id: number of the adapter in vLLM; not used.
        lora_path: directory of the adapter, as peft has saved it.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
