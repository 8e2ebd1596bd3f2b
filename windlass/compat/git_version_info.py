"""Module `deepspeed.git_version_info`: the build's version, ops and torch version."""

from __future__ import annotations

import torch

from windlass.compat.accelerator.real_accelerator import get_accelerator
from windlass.compat.op_builders import check_compatible_ops
from windlass.compat.root_names import git_branch as git_branch
from windlass.compat.root_names import git_hash as git_hash
from windlass.compat.root_names import version as version


def _major_minor(text: str | None) -> str:
    return ".".join((text or "0.0").split(".")[:2])


installed_ops = compatible_ops = check_compatible_ops()
accelerator_name = get_accelerator()._name
torch_info = {
    "version": _major_minor(torch.__version__),
    "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    "cuda_version": _major_minor(torch.version.cuda),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.cuda.is_available() else "0.0",
    "hip_version": _major_minor(torch.version.hip),
}
