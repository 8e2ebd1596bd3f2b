"""DeepSpeed's accelerator API.

Reading order: abstract_accelerator (the interface), cpu_accelerator, cuda_accelerator, real_accelerator (selection of
the accelerator of this process).
"""

from windlass.compat.accelerator.abstract_accelerator import DeepSpeedAccelerator as DeepSpeedAccelerator
from windlass.compat.accelerator.real_accelerator import get_accelerator as get_accelerator
from windlass.compat.accelerator.real_accelerator import (
    is_current_accelerator_supported as is_current_accelerator_supported,
)
from windlass.compat.accelerator.real_accelerator import set_accelerator as set_accelerator
