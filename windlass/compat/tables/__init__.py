"""Old dotted name -> windlass, one file an area. Rows say what is the same, what differs and how, what is refused."""

from windlass.compat.tables import accelerator, comm, core, ops, tools, unbuilt

TABLES = (core.TABLE, comm.TABLE, accelerator.TABLE, tools.TABLE, ops.TABLE, unbuilt.TABLE)
