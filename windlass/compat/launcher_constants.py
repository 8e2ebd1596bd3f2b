"""Module `deepspeed.constants`: environment variables of the launcher, and the rendezvous port."""

from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=10)
LOCAL_RANK = "LOCAL_RANK"
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
INFERENCE_GENERIC_MODE = "generic"
INFERENCE_SPECIALIZED_MODE = "specialized"
MIN_SWAPPABLE_BYTES = 1024**2
"""Size from which `deepspeed.runtime.swap_tensor` moves a tensor to NVMe. windlass offloads tensors of any size."""
