"""`python -m windlass` is `windlass`."""

from __future__ import annotations

from windlass.cli.main import main

if __name__ == "__main__":
    main()
