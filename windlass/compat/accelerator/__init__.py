"""The device by the names that scripts of DeepSpeed ask. Reading order: interface (what every device answers), host,
cuda, choose (which one this process has)."""

from windlass.compat.accelerator.choose import get_accelerator as get_accelerator
from windlass.compat.accelerator.choose import is_current_accelerator_supported as is_current_accelerator_supported
from windlass.compat.accelerator.choose import set_accelerator as set_accelerator
from windlass.compat.accelerator.interface import DeepSpeedAccelerator as DeepSpeedAccelerator
