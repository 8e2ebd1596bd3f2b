"""Tests of `aio_handle`, the writers of `deepspeed.io`, and the classes for layouts of DeepSpeed checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.base.errors import StorageError
from windlass.compat.aio_handle import aio_handle, aio_read, aio_write
from windlass.compat.checkpoint_reshape import model_3d_desc
from windlass.compat.file_writers import FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter

DATA = torch.arange(10_000, dtype=torch.float32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_round_trip(threads: int, dtype: torch.dtype, tmp_path: Path) -> None:
    handle = aio_handle(4096, 8, False, True, threads)
    data, file = DATA.to(dtype), str(tmp_path / "one")
    assert handle.sync_pwrite(data, file) == 1
    result = torch.zeros_like(data)
    assert handle.sync_pread(result, file) == 1
    assert torch.equal(result, data)
    assert handle.get_block_size() == 4096 and handle.get_intra_op_parallelism() == threads


def test_parallel_requests(tmp_path: Path) -> None:
    handle = aio_handle(1024, intra_op_parallelism=2)
    files = [str(tmp_path / str(n)) for n in range(3)]
    assert [handle.async_pwrite(DATA + n, file) for n, file in enumerate(files)] == [0, 0, 0]
    assert handle.wait() == 3 and handle.wait() == 0
    results = [torch.zeros_like(DATA) for _ in files]
    for tensor, file in zip(results, files, strict=True):
        handle.pread(tensor, file, True, True)
    assert handle.wait() == 3
    assert all(torch.equal(tensor, DATA + n) for n, tensor in enumerate(results))


def test_offsets_and_functions(tmp_path: Path) -> None:
    file = str(tmp_path / "one")
    assert aio_write(DATA, file) == 1
    handle = aio_handle()
    handle.sync_pwrite(torch.full((5,), -1.0), file, 40)
    result = torch.zeros_like(DATA)
    assert aio_read(result, file) == 1
    assert result[10:15].eq(-1).all() and torch.equal(result[15:], DATA[15:]) and torch.equal(result[:10], DATA[:10])
    part = torch.zeros(3)
    handle.sync_pread(part, file, 4 * 20)
    assert part.tolist() == [20, 21, 22]


def test_io_errors_are_reported(tmp_path: Path) -> None:
    handle, file = aio_handle(), str(tmp_path / "short")
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(StorageError, match="short ends at byte 4, but the tensor needs 36 bytes more"):
        handle.sync_pread(torch.zeros(10), file)
    handle.async_pread(torch.zeros(10), file)
    with pytest.raises(StorageError, match="ends at byte 4"):
        handle.wait()
    assert handle.wait() == 0, "a failure is told once"
    with pytest.raises(FileNotFoundError):
        handle.sync_pread(torch.zeros(1), str(tmp_path / "absent"))
    with pytest.raises(StorageError, match="not contiguous"):
        handle.sync_pwrite(torch.zeros(4, 4).t()[1:], file)
    with pytest.raises(StorageError, match="block_size 0"):
        aio_handle(0)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("memory", [1, 1000, 1 << 20])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_saves_through_the_fast_writer(double: bool, memory: int, zipped: bool, tmp_path: Path) -> None:
    if memory == 1:
        saved: dict[str, object] = {"weight": DATA[:20].clone(), "step": 3}
    else:
        saved = {"weight": DATA, "step": 3}
    config = FastFileWriterConfig(aio_handle(), torch.empty(memory, dtype=torch.uint8), double_buffer=double)
    writer = FastFileWriter(str(tmp_path / "model.pt"), config)
    torch.save(saved, writer, _use_new_zipfile_serialization=zipped)
    writer.close()
    loaded = torch.load(tmp_path / "model.pt")
    assert torch.equal(loaded["weight"], saved["weight"]) and loaded["step"] == 3  # type: ignore[arg-type]


def test_plain_writer_and_mock_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = PyFileWriter(tmp_path / "model.pt")
    torch.save({"weight": DATA}, writer)
    writer.flush()
    writer.close()
    assert torch.equal(torch.load(tmp_path / "model.pt")["weight"], DATA)
    writer._dump_state()
    assert "write_GB/s" in capsys.readouterr().out
    mock = MockFileWriter(tmp_path / "none.pt")
    torch.save({"weight": DATA}, mock)
    mock.close()
    assert (tmp_path / "none.pt").stat().st_size == 0
    assert mock._stats["bytes"] >= DATA.nbytes


def test_open_file_is_written_by_its_descriptor(tmp_path: Path) -> None:
    file = os.open(tmp_path / "one", os.O_CREAT | os.O_WRONLY)
    handle = aio_handle(1024)
    assert handle.async_pwrite(buffer=DATA[:5000], fd=file, file_offset=0) == 0 and handle.wait() == 1
    assert handle.sync_pwrite(DATA[5000:], file, 20_000) == 1
    os.close(file)
    result = torch.zeros_like(DATA)
    assert handle.sync_pread(result, str(tmp_path / "one")) == 1 and torch.equal(result, DATA)
    with pytest.raises(StorageError, match="no file is given"):
        handle.sync_pwrite(DATA)


def test_smaller_layout_maps_every_old_rank_once() -> None:
    """Old ranks that are neighbours along an axis merge into one new rank, and each is used exactly once."""
    old, new = (
        model_3d_desc(pp_degree=2, tp_degree=2, dp_degree=2),
        model_3d_desc(pp_degree=2, tp_degree=1, dp_degree=1),
    )
    maps = old.reshape(new)
    assert [made.get_data(stage, 0) for made in maps for stage in range(2)] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    for sizes in ((1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 2, 2)):
        maps = old.reshape(model_3d_desc(*sizes))
        assert len(maps) == sizes[2]
        assert sorted(rank for made in maps for rank in made.get_data()) == list(range(old.world_size()))
    assert new.can_reshape(old) == (
        False,
        ["Expansion reshape not supported - TP: 1 ---> 2"] + ["Expansion reshape not supported - DP: 1 ---> 2"],
    )
    assert old.is_valid(1, 1, 2)[0] is False and old.get_desc() == "PP,TP,DP = (2, 2, 2)"
    with pytest.raises(AssertionError, match="pp_index"):
        maps[0].get_data(2, 0)


def _write_layout(folder: Path, layouts: list[tuple[int, int] | None], data_ranks: int = 2) -> None:
    for rank, layout in enumerate(layouts):
        named = (
            {}
            if layout is None
            else {"checkpoint_parallel_dimensions": dict(zip(("pp_degree", "tp_degree"), layout, strict=True))}
        )
        torch.save({"module": {}, **named}, folder / f"mp_rank_{rank:02d}_model_states.pt")
        for data in range(data_ranks):
            torch.save({}, folder / f"bf16_zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt")


@pytest.mark.parametrize(
    ("layouts", "wanted"),
    [
        ([None, None], (1, 2, 2)),
        ([(2, 1)] * 2, (2, 1, 2)),
        ([(2, 1), None], "missing from model-state files"),
        ([(2, 1), (1, 2)], "disagrees across model-state files"),
        ([(2, 2)] * 2, "copy the whole directory"),
        ([(0, 1)] * 2, "two positive integers"),
    ],
)
def test_the_layout_of_a_directory(tmp_path: Path, layouts: list[tuple[int, int] | None], wanted: Any) -> None:
    from windlass.compat.checkpoint_layout import ZeROCheckpoint, get_model_3d_descriptor
    from windlass.compat.not_built import NotBuiltError

    _write_layout(tmp_path, layouts)
    if isinstance(wanted, str):
        with pytest.raises(RuntimeError, match=wanted):
            get_model_3d_descriptor(tmp_path)
        return
    actual = get_model_3d_descriptor(str(tmp_path))
    assert (actual.pp_degree, actual.tp_degree, actual.dp_degree) == wanted
    files = ZeROCheckpoint(tmp_path)
    assert (files.get_src_pp_degree(), files.get_src_tp_degree(), files.get_src_dp_degree()) == wanted
    assert files.get_src_world_size() == files.num_files == 4
    at = (1, 0, 1) if wanted[0] == 2 else (0, 1, 1)
    assert [Path(item).name for item in files.get_files_for_rank(*at)] == [
        "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"
    ]
    files.reshape(model_3d_desc())
    assert files.get_file_indices_for_rank(0, 0, 0) == [0, 2, 1, 3], "by place, and of each place by data rank"
    with pytest.raises(NotBuiltError, match="load_checkpoint"):
        files.get_state_for_rank(0, 0, 0)


def test_a_directory_without_states(tmp_path: Path) -> None:
    from windlass.compat.checkpoint_layout import ZeROCheckpoint

    with pytest.raises(RuntimeError, match="no ZeRO files"):
        ZeROCheckpoint(tmp_path)
