"""Optimizers, loss scales and learning-rate schedules.

Reading order: hyperparameter_checks, per_parameter_optimizer, lion, lamb, muon, mup, one_bit_adam, one_bit_lamb,
zero_one_adam, diloco, power_sgd (optimizers that torch lacks); quantized_states (8-bit states that are resharded);
cpu_optimizer, cpu_adam, cpu_lion, cpu_adagrad, cpu_sgd, cpu_lamb (steps in host memory); elementwise_optimizers (steps
on flat spans, fused steps); native_cpu_equivalent (replacement of an optimizer by its host-memory class);
optimizer_factory (configuration to optimizer); loss_scale (fp16); lr_schedule, lr_cycles, lr_warmups (schedules);
scheduler_factory (configuration to schedule); update_registry (names of user-defined optimizers).
"""

from __future__ import annotations

from windlass.optim.cpu_adagrad import CPUAdagrad as CPUAdagrad
from windlass.optim.cpu_adam import CPUAdam as CPUAdam
from windlass.optim.cpu_lamb import CPULamb as CPULamb
from windlass.optim.cpu_lion import CPULion as CPULion
from windlass.optim.cpu_sgd import CPUSGD as CPUSGD
from windlass.optim.diloco import DiLoCo as DiLoCo
from windlass.optim.lamb import Lamb as Lamb
from windlass.optim.lion import Lion as Lion
from windlass.optim.muon import Muon as Muon
from windlass.optim.muon import muon_groups as muon_groups
from windlass.optim.one_bit_adam import OneBitAdam as OneBitAdam
from windlass.optim.one_bit_lamb import OneBitLamb as OneBitLamb
from windlass.optim.power_sgd import PowerSGD as PowerSGD
from windlass.optim.update_registry import register_update as register_update
from windlass.optim.zero_one_adam import ZeroOneAdam as ZeroOneAdam
