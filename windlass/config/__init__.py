"""Configuration: one schema with the keys of `ds_config.json`, parsed strictly and checked as a whole.

Start with: `key_status` (statuses of keys), `config_section` (base of the schema), one file per section
(`precision_section`, `zero_section`, `parallel_section`, `pipeline_section`, `optimizer_section`, ...), `batch_sizes`,
`axis_sizes` (ranks along each axis), `feature_matrix` (features that work together), `config_refusals`, `root_config`
(the whole schema), `config_source`, `key_normalization`, `contradictions`, `config_loading` (from a file to a
`Config`), `key_table` (all keys with their status), `editor_schema` (JSON Schema).
"""

from windlass.config.axis_sizes import Axes
from windlass.config.batch_sizes import BatchSizes
from windlass.config.config_loading import ValidationResult, load_config, validate_config
from windlass.config.config_problems import ConfigProblem, ConfigRefusal
from windlass.config.optimizer_section import OptimizerConfig, ResolvedOptimizer
from windlass.config.precision_section import DtypeTable
from windlass.config.root_config import Config
from windlass.config.scheduler_section import SchedulerConfig

__all__ = [
    "Axes",
    "BatchSizes",
    "Config",
    "DtypeTable",
    "ValidationResult",
    "OptimizerConfig",
    "ConfigProblem",
    "ConfigRefusal",
    "ResolvedOptimizer",
    "SchedulerConfig",
    "validate_config",
    "load_config",
]
