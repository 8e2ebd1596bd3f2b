"""Tests that the garbage collector stays off while any caller needs it off, and is restored afterwards."""

from __future__ import annotations

import gc

import pytest

from windlass.base.garbage_collection import suspend_garbage_collection


@pytest.mark.parametrize("on", [True, False])
def test_last_resume_restores_the_former_setting(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        first, second = suspend_garbage_collection(), suspend_garbage_collection()
        assert not gc.isenabled()
        first()
        first()
        assert not gc.isenabled()
        second()
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_engine_suspends_collection_until_destroy() -> None:
    import torch
    import torch.distributed as dist

    import windlass

    config = {"train_micro_batch_size_per_gpu": 1, "disable_python_gc": True, "log_level": "critical"}
    alone = not dist.is_initialized()
    engine = windlass.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
    try:
        from windlass.base.log import logger

        assert not gc.isenabled() and logger.level == 50
    finally:
        engine.destroy()
        logger.setLevel("INFO")
        if alone:
            dist.destroy_process_group()
    assert gc.isenabled()
