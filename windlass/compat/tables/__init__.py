"""Tables from DeepSpeed's dotted names to windlass, one module per area.

A name works as in DeepSpeed, differs (with a note) or is refused.
"""

from windlass.compat.tables import (
    accelerator_names,
    comm_names,
    core_names,
    file_names,
    not_built_names,
    ops_names,
    parallel_names,
    tool_names,
)

TABLES = (
    core_names.TABLE,
    comm_names.TABLE,
    file_names.TABLE,
    accelerator_names.TABLE,
    tool_names.TABLE,
    ops_names.TABLE,
    parallel_names.TABLE,
    not_built_names.TABLE,
)
