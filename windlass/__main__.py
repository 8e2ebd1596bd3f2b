"""Command line of windlass, run as `python -m windlass`."""

from __future__ import annotations

from windlass.cli.main import main

if __name__ == "__main__":
    main()
