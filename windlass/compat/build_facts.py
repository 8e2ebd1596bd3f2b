"""`deepspeed.git_version_info`: what was built, and with which torch."""

from __future__ import annotations

import torch

from windlass.compat.accelerator.choose import get_accelerator
from windlass.compat.builders import compatible
from windlass.compat.standard import git_branch as git_branch
from windlass.compat.standard import git_hash as git_hash
from windlass.compat.standard import version as version


def _pair(text: str | None) -> str:
    return ".".join((text or "0.0").split(".")[:2])


installed_ops = compatible_ops = compatible()
accelerator_name = get_accelerator()._name
torch_info = {
    "version": _pair(torch.__version__),
    "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    "cuda_version": _pair(torch.version.cuda),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.cuda.is_available() else "0.0",
    "hip_version": _pair(torch.version.hip),
}
