"""Storage of offloaded tensors in host memory and on NVMe.

Reading order:

1. Disk tier: extent_allocator, byte_ranges, io_rates, disk_error_messages, staging_memory, process_directory,
   striped_files, disk_path_info, python_io_engine, io_engine, extent_transfer, transfer_queue, disk_tier,
   deferred_failure_tier.
2. Slots on any tier: staging_pool, slot.
3. Ordinary files: direct_file_reader, direct_file_writer, tensor_file, safetensors_header.
4. Measurement: tier_rates, disk_sweep, disk_processes.
"""

from __future__ import annotations

from windlass.storage.deferred_failure_tier import DeferredFailureTier as DeferredFailureTier
from windlass.storage.direct_file_writer import DirectFileWriter as DirectFileWriter
from windlass.storage.disk_path_info import inspect_disk_path as inspect_disk_path
from windlass.storage.disk_tier import DiskTier as DiskTier
from windlass.storage.extent_transfer import Extent as Extent
from windlass.storage.io_engine import default_io_engine as default_io_engine
from windlass.storage.io_rates import IoRates as IoRates
from windlass.storage.slot import Slot as Slot
from windlass.storage.slot import Tier as Tier
from windlass.storage.staging_memory import free_memory as free_memory
from windlass.storage.staging_memory import staging_buffer_bytes as staging_buffer_bytes
from windlass.storage.staging_pool import StagingPool as StagingPool
