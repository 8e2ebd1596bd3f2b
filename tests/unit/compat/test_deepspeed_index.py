"""Tests of reading DeepSpeed directories: supported content, content refused by name, and no execution of content."""

from __future__ import annotations

import argparse
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.deepspeed_checkpoint_writer import Trained, write
from tests.unit.checkpoint import sample_states
from windlass.base.errors import CheckpointError
from windlass.checkpoint import read_full, save
from windlass.checkpoint.checkpoint_listing import list_checkpoints
from windlass.checkpoint.safetensors_export import export_safetensors
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.compat.checkpoint.pickle_stand_ins import NumpyArrayStandIn, NumpyDtypeStandIn
from windlass.compat.checkpoint.torch_file import read_torch_file

MODEL, OPTIM = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def trained(**client: Any) -> Trained:
    """Return a state of two trained bf16 parameters, a frozen and a tied one, and a buffer."""
    torch.manual_seed(0)
    masters = {"up.weight": torch.randn(5, 3), "up.bias": torch.randn(5)}
    module = {name: value.bfloat16() for name, value in masters.items()}
    module |= {"base": torch.randn(7).bfloat16(), "seen": torch.arange(4)}
    module["head.weight"] = module["up.weight"]
    return Trained(
        module=module,
        buffers=["seen"],
        tied={"head.weight": "up.weight"},
        masters=masters,
        groups=[["up.weight"], ["up.bias"]],
        moments={name: {"exp_avg": torch.randn_like(value)} for name, value in masters.items()},
        step=4.0,
        hyper=[{"lr": 0.1, "betas": (0.9, 0.99), "fused": True}, {"lr": 0.2}],
        steps=4,
        samples=8,
        client=client,
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_value_is_read(stage: int, ranks: int, tmp_path: Path) -> None:
    state = trained(epoch=3)
    write(tmp_path, "t", state, stage=stage, ranks=ranks)
    with StoredCheckpoint(tmp_path, parameter_order=state.groups) as stored:
        for name, master in state.masters.items():
            assert torch.equal(stored.read_full(f"param/{name}"), master)
            assert torch.equal(
                torch.cat([part.clone() for part in stored.iter_parts(f"param/{name}", 4)]), master.view(-1)
            )
            assert torch.equal(stored.read_full(f"state/{name}/exp_avg"), state.moments[name]["exp_avg"])
            assert stored.read_full(f"state/{name}/step").item() == 4
        assert torch.equal(stored.read_full("param/base"), state.module["base"])
        assert torch.equal(stored.read_full("buffer/seen"), torch.arange(4))
        assert stored.plain["layout"] == {"stage": stage, "ranks": ranks}
        assert stored.plain["client"] == {"epoch": 3}
        assert stored.plain["groups"] == [
            {"parameters": ["up.weight"], "values": {"lr": 0.1, "betas": (0.9, 0.99)}},
            {"parameters": ["up.bias"], "values": {"lr": 0.2}},
        ]
    result = export_safetensors(tmp_path, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert result.tied == {"head.weight": "up.weight"}
    assert set(written) == set(state.module) - {"head.weight"}
    for name, value in written.items():
        assert torch.equal(value, state.module[name]) and value.dtype == state.module[name].dtype, name


def test_deepspeed_checkpoints_are_listed_and_verified(tmp_path: Path) -> None:
    write(tmp_path, "t", trained(), stage=2, ranks=2)
    (result,) = list_checkpoints(tmp_path, verify=True).checkpoints
    assert (result.tag, result.step, result.stage, result.ranks, result.latest, result.problem) == (
        "t",
        4,
        2,
        2,
        True,
        "",
    )
    path = tmp_path / "t" / OPTIM
    at = read_torch_file(path)["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].begin
    good = bytearray(path.read_bytes())
    good[at] ^= 1
    path.write_bytes(bytes(good))
    assert "is damaged: record" in list_checkpoints(tmp_path, verify=True).checkpoints[0].problem


def test_dynamic_loss_scale_is_restored(tmp_path: Path) -> None:
    state = trained()
    state.scaler = {"dynamic": True, "cur_scale": 512.0, "cur_iter": 10, "last_overflow_iter": 6, "cur_hysteresis": 2}
    write(tmp_path, "t", state, stage=1, ranks=1)
    expected = {"scale": 512.0, "good_steps": 3, "hysteresis_left": 2, "cur_iter": 10}
    assert StoredCheckpoint(tmp_path).plain["loss_scale"] == expected


# tests of content that must never be executed


class Planted:
    """Object whose pickle creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def repacked(path: Path, pickled: bytes) -> None:
    """Replace the pickle in a file of `torch.save`."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)


@pytest.mark.parametrize("file", [MODEL, OPTIM])
@pytest.mark.parametrize("kind", ["torch.save", "repacked", "bare"])
def test_a_malicious_pickle_is_refused_by_name(file: str, kind: str, tmp_path: Path) -> None:
    write(tmp_path, "t", trained(), stage=1, ranks=2)
    path, trap = tmp_path / "t" / file, tmp_path / "trap"
    payload = pickle.dumps({"module": {}, "x": Planted(trap)})
    assert pickle.loads(payload)["x"] is None and trap.exists()  # the trap works
    trap.rmdir()
    if kind == "torch.save":
        torch.save({"module": {}, "x": Planted(trap)}, path)
    elif kind == "repacked":
        repacked(path, payload)
    else:
        path.write_bytes(payload)
    text = r"requests (posix|nt)\.mkdir, which is neither" if kind != "bare" else "old file of torch.save"
    for act in (
        lambda: StoredCheckpoint(tmp_path),
        lambda: export_safetensors(tmp_path, tmp_path / "out"),
        lambda: list(read_full(tmp_path)),
    ):
        with pytest.raises(CheckpointError, match=text) as refused:
            act()
        assert file in str(refused.value)
    assert text.split(" ")[0] in list_checkpoints(tmp_path).checkpoints[0].problem
    assert not trap.exists()


@pytest.mark.parametrize("kept", [True, False])
def test_pickle_planted_in_a_windlass_directory_is_ignored(kept: bool, tmp_path: Path) -> None:
    root, trap = tmp_path / "run", tmp_path / "trap"
    save(root, "t", sample_states.state(0, 1))
    for name in (MODEL, OPTIM, "pytorch_model.bin", "rank_00001.safetensors"):
        torch.save({"module": {}, "x": Planted(trap)}, root / "t" / name)
    if kept:
        assert len(dict(read_full(root))) == 10
        assert not list_checkpoints(root, verify=True).is_damaged
    else:
        (root / "t" / "checkpoint.json").unlink()
        with pytest.raises(CheckpointError, match=r"requests (posix|nt)\.mkdir"):
            list(read_full(root))
    assert not trap.exists()


def _changes(name: str, *rest: bytes) -> bytes:
    return b"".join([b"\x80\x02c", name.replace(" ", "\n").encode(), b"\n", *rest, b"."])


ODD = {
    "an attribute of what rebuilds tensors": (
        _changes("torch._utils _rebuild_tensor_v2", b"}X\x01\x00\x00\x00aK\x01sb"),
        "changes the state of a AllowedFunction",
    ),
    "a slot of it": (
        _changes("torch._utils _rebuild_tensor_v2", b"N}X\x09\x00\x00\x00_functionK\x01s\x86b"),
        "changes the state of a AllowedFunction",
    ),
    "a method of a stand-in": (
        _changes("argparse Namespace", b"N}X\x0c\x00\x00\x00__setstate__K\x01s\x86b"),
        "its pickle cannot be read",
    ),
    "a class of ours": (
        _changes("windlass.compat.checkpoint.torch_file TorchFile", b")\x81"),
        "requests windlass.compat.checkpoint.torch_file.TorchFile",
    ),
    "an extension": (b"\x80\x02\x82\x01.", "its pickle cannot be read"),
    "nothing": (b"", "its pickle cannot be read"),
    "cut short": (b"\x80\x02}X\x05", "its pickle cannot be read"),
    "a tensor without storage": (
        _changes("torch._utils _rebuild_tensor_v2", b"(K\x01K\x00))tR"),
        "a tensor without storage",
    ),
    "a number": (b"\x80\x02K\x01.", "it holds a int"),
}


@pytest.mark.parametrize(("pickled", "error_text"), ODD.values(), ids=ODD)
def test_pickle_that_would_change_the_reader_is_refused(pickled: bytes, error_text: str, tmp_path: Path) -> None:
    path = write(tmp_path, "t", trained(), stage=0, ranks=1) / MODEL
    good = path.read_bytes()
    repacked(path, pickled)
    with pytest.raises(CheckpointError, match=error_text) as refused:
        StoredCheckpoint(tmp_path)
    assert MODEL in str(refused.value)
    path.write_bytes(good)
    assert StoredCheckpoint(tmp_path).plain["engine"]["global_steps"] == 4, "the reader is as it was"


def test_client_state_is_read_as_plain_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    np = pytest.importorskip("numpy")
    options = argparse.Namespace(lr=0.1, path=Path("/a/b"), inner=argparse.Namespace(n=1))
    client = {"args": options, "best": np.float64(1.5), "kinds": {"a"}, "dtype": torch.bfloat16, "raw": b"\x00\xff"}
    numbers = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    client |= {"numpy": np.random.get_state(), "array": numbers, "texts": np.array(["a", "bc"]), "none": b""}
    write(tmp_path, "t", trained(**client, odd=np.zeros(1, "M8[s]")), stage=0, ranks=1)
    with caplog.at_level("WARNING", logger="windlass"):
        result = StoredCheckpoint(tmp_path).plain["client"]
    random, array, texts = result.pop("numpy"), result.pop("array"), result.pop("texts")
    assert result == {
        "args": argparse.Namespace(lr=0.1, path="/a/b", inner=argparse.Namespace(n=1)),
        "best": 1.5,
        "kinds": {"a"},
        "dtype": torch.bfloat16,
        "raw": b"\x00\xff",
        "none": b"",
    }
    assert (array == numbers).all() and texts.tolist() == ["a", "bc"]
    assert (random[1] == client["numpy"][1]).all() and random[2:] == client["numpy"][2:]
    assert "'odd' of the client state is not read" in caplog.text


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    from tests.deepspeed_checkpoint_writer import deepspeed_classes

    with deepspeed_classes():
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)


def test_mismatched_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "t", trained(), stage=1, ranks=2)
    good = (path / OPTIM).read_bytes()

    def error_text() -> str:
        with pytest.raises(CheckpointError) as refused:
            StoredCheckpoint(tmp_path)
        return str(refused.value)

    (path / OPTIM).unlink()
    assert "2 ranks saved, but 1 *_optim_states.pt files are there" in error_text()
    (path / OPTIM).write_bytes(good)
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert "the file of rank 0 is missing" in error_text()
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(good)
    assert "its files disagree about" in error_text()
    path = write(tmp_path, "u", trained(), stage=0, ranks=1)
    full = (path / MODEL).read_bytes()
    (path / MODEL).write_bytes(full[:-100])
    assert MODEL in error_text()
    (path / MODEL).write_bytes(full)
    changed(path / MODEL, lambda value: value.update(mp_world_size=2))
    assert "model, pipeline or expert parallelism" in error_text()
    (path / MODEL).write_bytes(full)
    changed(path / MODEL, lambda value: value["module"].update(base=torch.randn(4, 3).t()))
    assert "'param/base' was saved with strides (1, 3)" in error_text()
    (path / MODEL).write_bytes(full)
    changed(path / MODEL, lambda value: value.update(ds_config=5, optimizer={"state": {}}))
    with pytest.raises(CheckpointError, match=r"layout that DeepSpeed 0.19 writes \(KeyError: 'param_groups'\)"):
        StoredCheckpoint(tmp_path, parameter_order=trained().groups)
    (path / MODEL).write_bytes(full)
    changed(path / MODEL, lambda value: value.pop("module"))
    assert "have no key module" in error_text()
    raw = BytesIO()
    torch.save({"module": OrderedDict()}, raw, _use_new_zipfile_serialization=False)
    (path / MODEL).write_bytes(raw.getvalue())
    assert "an old file of torch.save" in error_text()


def test_file_names_are_those_of_the_directory(tmp_path: Path) -> None:
    """Neither the content of `latest` nor a tag that is a symbolic link can lead outside the directory."""
    write(tmp_path / "run", "t", trained(), stage=0, ranks=1)
    os.rename(tmp_path / "run" / "t", tmp_path / "outside")
    (tmp_path / "run" / "latest").write_text("../outside")
    with pytest.raises(CheckpointError, match="latest is refused"):
        StoredCheckpoint(tmp_path / "run")
    os.symlink(tmp_path / "outside", tmp_path / "run" / "t")
    with pytest.raises(CheckpointError, match="leads outside"):
        StoredCheckpoint(tmp_path / "run", "t")


@pytest.mark.parametrize(
    "saved",
    [
        None,
        (1, (2,)),
        (1, (9,), NumpyDtypeStandIn(("f8",)), False, b"0123456789abcdef"),
        (1, "ab", NumpyDtypeStandIn(("f8",)), False, b"0123456789abcdef"),
        (1, (2,), NumpyDtypeStandIn(("f7",)), False, b"0123456789abcdef"),
        (1, (2,), NumpyDtypeStandIn(("O8",)), False, b"0123456789abcdef"),
        (1, (2**70,), NumpyDtypeStandIn(("f8",)), False, b""),
    ],
)
def test_malformed_numpy_metadata_is_refused(saved: Any) -> None:
    """Array metadata that is malformed, or that does not fit the array's bytes, raises CheckpointError."""
    pytest.importorskip("numpy")
    array = NumpyArrayStandIn()
    array.set_state(saved)
    with pytest.raises(CheckpointError, match="numpy"):
        array.to_numpy()
