"""Old dotted name -> windlass, one file an area. Rows say what is the same, what differs and how, what is refused."""

from windlass.compat.tables import accelerator, comm, core, files, ops, parallel, tools, unbuilt

TABLES = (core.TABLE, comm.TABLE, files.TABLE, accelerator.TABLE, tools.TABLE, ops.TABLE, parallel.TABLE, unbuilt.TABLE)
