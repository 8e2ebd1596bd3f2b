"""What holds for every test: no network, no chatter of libraries, and no debugging asked for by who runs the tests."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads and the ranks that tests fork do not go together
for _name in ("WINDLASS_DEBUG", "WINDLASS_TRANSPORT", "WINDLASS_LOG_LEVEL", "LOGLEVEL"):
    os.environ.pop(_name, None)

# Machines that run tests are often busy: a slow example is no failure. On CI the examples are the same every time.
settings.register_profile("windlass", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("windlass")
