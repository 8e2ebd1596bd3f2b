"""The configuration: one schema in the words of `ds_config.json`, read strictly and checked as a whole.

Files in reading order: `verdict` (what becomes of a key), `section` (the base of the schema), one file a section
(`batch`, `precision`, `zero`, `parallel`, `pipeline`, `optimizer`, ...), `axes` (ranks along each), `composition`
(what works with what), `refusals`, `root` (the whole schema), `source`, `normalise`, `contradictions`, `loading` (from
a file to a `Config`), `table` (every key and its verdict), `editor_schema` (JSON Schema).
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
