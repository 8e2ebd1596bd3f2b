"""Table from the names of `deepspeed.accelerator` (device classes and functions) to windlass."""

from windlass.compat.stand_in_entry import StandInEntry, differs, refused, works

_HERE = "windlass.compat.accelerator"
_CHOOSE = {
    name: works(f"{_HERE}.real_accelerator:{name}")
    for name in ("get_accelerator", "set_accelerator", "is_current_accelerator_supported")
}
_INTERFACE = works(f"{_HERE}.abstract_accelerator:DeepSpeedAccelerator")
_HOST = differs(f"{_HERE}.cpu_accelerator:CPU_Accelerator", "current_device() is an int even if LOCAL_RANK is set")

TABLE: dict[str, StandInEntry] = {
    "deepspeed.get_accelerator": _CHOOSE["get_accelerator"],
    **{f"deepspeed.accelerator.{name}": entry for name, entry in _CHOOSE.items()},
    **{f"deepspeed.accelerator.real_accelerator.{name}": entry for name, entry in _CHOOSE.items()},
    "deepspeed.accelerator.real_accelerator.SUPPORTED_ACCELERATOR_LIST": differs(
        f"{_HERE}.real_accelerator:SUPPORTED_ACCELERATOR_LIST", "CUDA and CPU only"
    ),
    "deepspeed.accelerator.DeepSpeedAccelerator": _INTERFACE,
    "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator": _INTERFACE,
    "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator": _HOST,
    "deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator": works(f"{_HERE}.cuda_accelerator:CUDA_Accelerator"),
    **{
        f"deepspeed.accelerator.{name}_accelerator.{name.upper()}_Accelerator": refused(
            "windlass runs on CUDA and on CPUs; use one of these"
        )
        for name in ("xpu", "npu", "mps", "hpu", "mlu", "sdaa")
    },
}
