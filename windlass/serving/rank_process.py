"""Process of one rank of a served model: `python -m windlass.serving.rank_process SOURCE`.

The process computes its part of each step until rank 0, the server, closes the engine.
"""

from __future__ import annotations

import sys

from windlass.base.errors import WindlassError
from windlass.serving.engine_loading import EngineSource


def main(text: str) -> int:
    """Load this rank's part of the model, given an `EngineSource` as JSON, and run steps. Return the exit code."""
    try:
        EngineSource.from_json(text).run_rank()
    except WindlassError as error:
        print(f"windlass: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
