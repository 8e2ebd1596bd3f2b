"""What each rank of a verification starts as: `python -m windlass.verify.rank ORDER`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

from windlass.verify.order import Order


def main(path: str) -> int:
    """Run one rank; the exit code is 0 whatever was found, 1 where nothing could be compared."""
    order = Order.read(path)
    os.dup2(2, 1)  # what a script prints shall not stand between the lines of the verdict
    try:
        run(order)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
            raise
        _leave_reason(order, error)
        from windlass import watchdog

        watchdog.failed(error)
        return 1
    return 0


def run(order: Order) -> None:
    """Train what `order` names, watched, in this process, which is a rank; rank 0 leaves the verdict.

    Raises:
        VerifyError: it ended without a step.
    """
    from windlass.engine.watch import install
    from windlass.verify import subject
    from windlass.verify.session import Finished, Session
    from windlass.verify.watched import VerifyError

    session = Session(order)
    before = install(session)
    try:
        if order.script:
            _run_script(order.script)
        else:
            subject.train(order)
    except Finished:
        return
    finally:
        install(before)
    if not session.engines:
        raise VerifyError(
            "the script ended and never made an engine with an optimizer: windlass.initialize(model=..., config=...)"
        )
    if not session.engines[0].steps:
        raise VerifyError("the script ended before its first engine.step() at an accumulation boundary")
    session.ended_early()
    session.write()


def _run_script(words: list[str]) -> None:
    import windlass
    from windlass.verify.session import Finished

    sys.modules.setdefault("deepspeed", windlass)  # for scripts that say so; its own name wins where it was imported
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code or isinstance(ended, Finished):
            raise


def _leave_reason(order: Order, error: BaseException) -> None:
    """Keep the first failure of all ranks: what fails later follows from it."""
    from windlass.base.errors import WindlassError

    rank = os.environ.get("RANK", "0")
    text = str(error) if isinstance(error, WindlassError) else f"{type(error).__name__}: {error}"
    if os.environ.get("WINDLASS_DEBUG", "0") not in ("", "0") or not isinstance(error, WindlassError):
        traceback.print_exc()
    try:
        with open(order.failure, "x") as stream:
            stream.write(f"rank {rank}: {text}")
    except FileExistsError:  # another rank's
        return


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait at exit for peers that are still in a collective.
    os._exit(code)
