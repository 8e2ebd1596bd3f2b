"""The configuration: one schema in the words of `ds_config.json`, read strictly and checked as a whole.

Files in reading order: `verdict` (what becomes of a key), `section` (the base of the schema), one file a section
(`batch`, `precision`, `zero`, `parallel`, `pipeline`, `optimizer`, ...), `axes` (ranks along each), `composition`
(what works with what), `refusals`, `root` (the whole schema), `source`, `normalise`, `contradictions`, `loading` (from
a file to a `Config`), `table` (every key and its verdict), `editor_schema` (JSON Schema).
"""

from windlass.config.axes import Axes
from windlass.config.batch import Batch
from windlass.config.loading import Examination, examine, load
from windlass.config.optimizer import OptimizerConfig, ResolvedOptimizer
from windlass.config.precision import DtypeTable
from windlass.config.problems import Problem, Refusal
from windlass.config.root import Config
from windlass.config.scheduler import SchedulerConfig

__all__ = [
    "Axes",
    "Batch",
    "Config",
    "DtypeTable",
    "Examination",
    "OptimizerConfig",
    "Problem",
    "Refusal",
    "ResolvedOptimizer",
    "SchedulerConfig",
    "examine",
    "load",
]
