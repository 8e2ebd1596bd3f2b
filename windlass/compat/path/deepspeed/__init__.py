"""Package `deepspeed` of the stand-in: every name comes from the tables in `windlass.compat`."""

from windlass.compat.module_finder import install_finder
from windlass.compat.stand_in_path import log_hidden_deepspeed

install_finder(__name__)
log_hidden_deepspeed()
