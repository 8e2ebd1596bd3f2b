"""Optimizers, what may be done with them, loss scales and schedules. In reading order:

one_by_one, lion, lamb, muon, mup (optimizers torch lacks), coded (8-bit states that are cut elsewhere), cpu_optimizer,
cpu_adam, cpu_lion, cpu_adagrad, cpu_sgd, cpu_lamb (steps in host memory), elementwise (flat spans, fused steps), cpu
(which of them stands in for which), by_name (configuration -> optimizer), loss_scale (fp16), lr_schedule, lr_cycles,
lr_warmups (schedules), schedules (configuration -> schedule), update_registry (names of user-defined optimizers).
"""

from __future__ import annotations

from windlass.optim.cpu_adagrad import CPUAdagrad as CPUAdagrad
from windlass.optim.cpu_adam import CPUAdam as CPUAdam
from windlass.optim.cpu_lamb import CPULamb as CPULamb
from windlass.optim.cpu_lion import CPULion as CPULion
from windlass.optim.cpu_sgd import CPUSGD as CPUSGD
from windlass.optim.lamb import Lamb as Lamb
from windlass.optim.lion import Lion as Lion
from windlass.optim.muon import Muon as Muon
from windlass.optim.muon import muon_groups as muon_groups
from windlass.optim.update_registry import register_update as register_update
