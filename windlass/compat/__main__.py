"""Command `python -m windlass.compat`: print the folder that makes `import deepspeed` import windlass."""

import sys

from windlass.compat.stand_in_path import STAND_IN_FOLDER


def main(arguments: list[str]) -> int:
    """Print the folder. Return the exit status."""
    if arguments:
        print("python -m windlass.compat takes no arguments: it prints a folder for PYTHONPATH", file=sys.stderr)
        return 2
    print(STAND_IN_FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
