"""Fuzz tests of the `.pt` files of DeepSpeed checkpoints, for every reader. Some pickles consist of any opcodes."""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.deepspeed_checkpoint_writer import write
from tests.fuzz.checkpoints import one_of, readers, seeds_of, trained
from tests.fuzz.mutations import BYTES, LONG, SECONDS, fuzz, keeps_the_law
from windlass.compat.checkpoint.torch_file import read_torch_file


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


# Parts of pickles: single opcodes, and sequences that are dangerous in a reader that executes them.
OPCODES = [bytes([code]) for code in range(256)]
PIECES = [
    b"r\xff\xff\xff\x7f",
    b"j\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8e" + struct.pack("<Q", 1 << 40),
    b"B\xff\xff\xff\x7f",
    b"X\xff\xff\xff\xff",
    b"]" * 500,
    b"}q\x00" + b"h\x00" * 200,
    b"(" * 300,
    b"]q\x00h\x00a",
    b"]" + b"]q\x01h\x01h\x01\x86" * 60,
    _text("x" * 5000) + b"q\x02",
    _name("_codecs", "encode") + b"h\x02" + _text("latin1") + b"\x86R",
    (_name("pathlib", "PosixPath") + b"h\x02h\x02\x86Rq\x02") * 40,
    _name("torch", "Size") + b"h\x00\x85R",
    _name("collections", "OrderedDict") + b")R",
    _name("argparse", "Namespace") + b")\x81}" + _text("a") + b"K\x01sb",
    _name("numpy", "ndarray") + b")\x81N" + b"b",
    _name("os", "system") + _text("true") + b"\x85R",
    _name("torch._utils", "_rebuild_tensor_v2") + b"(h\x00K\x00(K\x02tK\x01\x85tR",
    b"(" + _text("storage") + _name("torch", "FloatStorage") + _text("0") + _text("cpu") + b"K\x01tQ",
    b"(" + b"".join(b"\x8a\x09" + (n * ((1 << 61) - 1)).to_bytes(9, "little") + b"N" for n in range(200)) + b"d",
]


def repacked(good: bytes, pickled: bytes, *, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the file with another pickle and correct checksums."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(good)) as old, zipfile.ZipFile(made, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else old.read(info))
    return made.getvalue()


def pickle_of(good: bytes) -> bytes:
    """Return the pickle in a file."""
    with zipfile.ZipFile(BytesIO(good)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def _other_pickle(draw: random.Random, pickled: bytes) -> bytes:
    if draw.randrange(3) == 0:
        return draw.choice(BYTES)(draw, pickled)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(pickled))
        pickled = pickled[:at] + draw.choice(PIECES) + pickled[at + draw.choice((0, 0, 1, 5)) :]
    return pickled


def _fuzz(tmp_path: Path, stage: int, share: float, *, forged: bool) -> None:
    directory = tmp_path / "run"
    write(directory, "t", trained(), stage=stage, ranks=2)
    files = sorted((directory / "t").glob("*.pt"))
    goods = [path.read_bytes() for path in files]
    pickles = [pickle_of(good) for good in goods]
    rest = sum(map(len, goods))
    all_readers = readers(directory, tmp_path / "out")
    del all_readers["plain"]  # reads into `net()`, which has other parameters
    if not stage:
        del all_readers["zero_to_fp32"]  # not for stage 0
    seeds = seeds_of(all_readers)

    def make(draw: random.Random) -> tuple[int, bytes]:
        for path, good in zip(files, goods, strict=True):
            path.write_bytes(good)
        number = draw.randrange(len(files))
        if forged:
            method = zipfile.ZIP_DEFLATED if draw.randrange(20) == 0 else zipfile.ZIP_STORED
            case = repacked(goods[number], _other_pickle(draw, pickles[number]), method=method)
        else:
            case = draw.choice(BYTES)(draw, goods[number])
        files[number].write_bytes(case)
        return len(case) + rest, case

    vouched = (lambda name, value: "") if forged else one_of(seeds)
    fuzz(share, make, all_readers, vouched, tmp_path.parent / f"torch{stage}.case")
    shutil.rmtree(tmp_path)


def test_damage_is_refused_by_every_reader(tmp_path: Path) -> None:
    _fuzz(tmp_path / "2", 2, 0.07, forged=False)
    _fuzz(tmp_path / "3", 3, 0.06, forged=False)


def test_forged_pickles_do_no_harm_to_any_reader(tmp_path: Path) -> None:
    _fuzz(tmp_path / "0", 0, 0.06, forged=True)
    _fuzz(tmp_path / "2", 2, 0.06, forged=True)
    _fuzz(tmp_path / "3", 3, 0.06, forged=True)


pickles = st.lists(st.sampled_from(OPCODES) | st.sampled_from(PIECES) | st.binary(max_size=9), max_size=60).map(
    b"".join
)


@settings(
    max_examples=max(50, int(SECONDS * 5)),
    derandomize=not LONG,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.generate, Phase.shrink],
)
@given(pickled=pickles, ends=st.booleans())
def test_any_opcodes(tmp_path_factory: Any, pickled: bytes, ends: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "opcodes.pt"
    made = BytesIO()
    with zipfile.ZipFile(made, "w") as new:
        new.writestr("x/data.pkl", b"\x80\x02" + pickled + b"." * ends)
        new.writestr("x/data/0", b"0123")
    path.write_bytes(made.getvalue())
    nbytes = path.stat().st_size
    assert not keeps_the_law(lambda: read_torch_file(path), nbytes, lambda value: "", floor=20 << 20)
