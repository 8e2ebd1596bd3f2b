"""Homes away from the device, in reading order: space, spans, rates, failure, memory, claim, stripes,
prospect, python_engine, engine, new_file, transfer, mover, tier, patient, staging, slot."""

from __future__ import annotations

from windlass.storage.engine import path_in_use as path_in_use
from windlass.storage.memory import buffer_bytes as buffer_bytes
from windlass.storage.memory import free_memory as free_memory
from windlass.storage.new_file import NewFile as NewFile
from windlass.storage.patient import PatientTier as PatientTier
from windlass.storage.prospect import look_at as look_at
from windlass.storage.rates import Rates as Rates
from windlass.storage.slot import Home as Home
from windlass.storage.slot import Slot as Slot
from windlass.storage.staging import Staging as Staging
from windlass.storage.tier import DiskTier as DiskTier
from windlass.storage.transfer import Extent as Extent
