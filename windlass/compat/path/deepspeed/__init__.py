"""`deepspeed`, as windlass stands in for it: every name comes from the table in `windlass.compat`."""

from windlass.compat.finder import take_over
from windlass.compat.place import announce

take_over(__name__)
announce()
