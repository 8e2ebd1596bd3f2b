"""Make a virtual environment on top of another one. Its own packages take precedence over those below.

    python tools/make_layered_venv.py BELOW TARGET [REQUIREMENT | --upgrade]...

Clients of DeepSpeed are installed into the new environment as the requirements need them. The torch of BELOW is used.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

CLIENT_PACKAGES = ("transformers", "accelerate", "peft", "trl", "lightning", "datasets")


def main(base_environment: str, target: str, *requirements: str) -> None:
    """Create the environment and install the requirements."""
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    venv.create(target, with_pip=True, clear=True)
    # Added through `site`, so that editable installations of the environment below are found too.
    line = f"import site; site.addsitedir({str(Path(base_environment).resolve() / packages)!r})\n"
    Path(target, packages, "below.pth").write_text(line)
    # MPI's library is in `lib` next to Python's folder, where mpi4py looks for it by the prefix of the environment.
    for entry in Path(base_environment, "lib").resolve().iterdir():
        if not entry.name.startswith("python"):
            Path(target, "lib", entry.name).symlink_to(entry)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pin:
        pin.write(f"torch=={version('torch').partition('+')[0]}\n")
        pin.flush()
        install = [str(Path(target, "bin", "python")), "-m", "pip", "install", "-qq", "--no-compile"]
        options = ["--disable-pip-version-check", "-c", pin.name]
        subprocess.run([*install, *options, *CLIENT_PACKAGES, *requirements], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
