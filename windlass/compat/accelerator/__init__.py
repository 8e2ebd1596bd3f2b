"""The device by the names that scripts of DeepSpeed ask. Reading order: interface (what every device answers), host,
cuda, choose (which one this process has)."""

from windlass.compat.accelerator.abstract_accelerator import DeepSpeedAccelerator as DeepSpeedAccelerator
from windlass.compat.accelerator.real_accelerator import get_accelerator as get_accelerator
from windlass.compat.accelerator.real_accelerator import (
    is_current_accelerator_supported as is_current_accelerator_supported,
)
from windlass.compat.accelerator.real_accelerator import set_accelerator as set_accelerator
