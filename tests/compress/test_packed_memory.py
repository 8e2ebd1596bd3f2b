"""Memory of a packed model that was loaded from a file: a process holds each weight once."""

from __future__ import annotations

import copy
import ctypes
import gc
import mmap
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.causal_models import build
from tests.inference.greedy_reference import assert_greedy
from windlass.compress.packed_directory import write_packed_directory
from windlass.compress.packed_model import load_packed_model
from windlass.inference.llm import LLM
from windlass.inference.sampling_params import SamplingParams
from windlass.kernels import packed_gemm
from windlass.kernels.inference_path import get_inference_path
from windlass.kernels.mapped_bytes import drop_pages, find_pages, map_bytes, record_mapped_parameters
from windlass.kernels.packed_linear import PackedLinear

FORMATS = ["int4_g128", "int8", "binary_g128"]
IDS = torch.arange(12)[None]
_M_MMAP_THRESHOLD = -3  # constant of <malloc.h>
FAULT_BYTES = 1 << 16  # pages that one fault maps
OVERHEAD = 10 << 20  # activations, KV cache, and the layer that is being packed

native = pytest.mark.skipif(get_inference_path().module is None, reason="there are no native kernels here")


@pytest.fixture(scope="module", params=FORMATS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    model: Any = build("llama", hidden_size=512, intermediate_size=1536, vocab_size=32)
    model.save_pretrained(folder / "wide")
    write_packed_directory(folder / "wide", folder / "packed", request.param)
    return folder / "packed"


def resident(path: Path) -> int:
    """Return the bytes of a file's pages that this process holds, private copies included."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            total += 1024 * int(line.split()[1])
    return total


def layers(model: Any) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def panel_bytes(model: Any) -> int:
    return sum(one._panels._panels.nbytes for one in layers(model) if one._panels._panels is not None)


@native
def test_a_weight_is_held_once(directory: Path) -> None:
    file = directory / "model.safetensors"
    model = load_packed_model(directory)
    large = sum(p.nbytes for one in layers(model) for p in one.parameters() if p.nbytes >= 1 << 14)
    assert large > 0.85 * sum(p.nbytes for one in layers(model) for p in one.parameters())
    assert resident(file) < 0.1 * large, "loading reads no weight"
    with torch.no_grad():
        first = model(IDS).logits
        assert not panel_bytes(model) and resident(file) < 0.2 * large, "embedding and head alone"
        second = model(IDS).logits
    assert panel_bytes(model) + resident(file) < 1.1 * file.stat().st_size
    assert torch.equal(first, second)
    own = load_packed_model(directory)  # the same model with packed tensors in memory, not mapped
    for one in layers(own):
        one.set_packed({name: tensor.clone() for name, tensor in one.packed().items()})
    wide = copy.deepcopy(model)
    for name, module in list(wide.named_modules()):
        if isinstance(module, PackedLinear):
            wide.set_submodule(name, module.to_linear(torch.float32))
    with torch.no_grad():
        assert torch.equal(own(IDS).logits, second)
        torch.testing.assert_close(wide(IDS).logits, second, rtol=1e-4, atol=1e-5)


def peak_of(work: Callable[[], object]) -> int:
    """Return the bytes by which the memory of a forked process grows at most while it runs a function."""
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gc.freeze()  # a collection would write to all objects of the parent, and so copy their pages
            libc = ctypes.CDLL(None)
            libc.malloc_trim(0)  # so that memory freed earlier counts when it is allocated again
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17)  # glibc raises it after large frees, and keeps freed memory then
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the present memory
            before = peak()
            work()
            os.write(ends[1], str(peak() - before).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(ends[1])
    with os.fdopen(ends[0]) as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return int(found)


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@native
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_the_peak_is_the_file_and_little_more(directory: Path, tmp_path: Path) -> None:
    """The linear layers are never all unpacked at once: in float32 they would take 25 MB.

    A forked process also copies pages of the interpreter, so the peak of a small model is subtracted.
    """
    small: Any = build("llama", hidden_size=64, intermediate_size=128, vocab_size=32)
    small.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int8")

    def run(folder: Path) -> None:
        model = load_packed_model(folder)
        with torch.no_grad():
            for _ in range(3):
                model(IDS)

    def serve(folder: Path) -> None:
        with LLM(folder, skip_tokenizer_init=True, kv_cache_tokens=64, max_sequences=1, max_tokens_per_step=16) as llm:
            llm.generate([IDS[0].tolist()], SamplingParams(temperature=0, max_tokens=4))

    for work in (run, serve):
        work(directory)  # imports all modules before the fork
        least = peak_of(lambda work=work: work(tmp_path / "packed"))
        most = peak_of(lambda work=work: work(directory))
        assert most - least < 1.1 * (directory / "model.safetensors").stat().st_size + OVERHEAD


@native
def test_the_backward_reads_the_bytes_again(directory: Path) -> None:
    file = directory / "model.safetensors"
    model = load_packed_model(directory)
    layer = layers(model)[0]
    wide = layer.to_linear(torch.float32)
    for _ in range(3):
        x = torch.randn(2, layer.in_features, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        layer(x).square().sum().backward()
        wide(twin).square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-4)
        assert resident(file) <= 1 << 17  # at most two page faults, each of which maps 16 pages


def test_modified_pages_cannot_be_dropped(tmp_path: Path) -> None:
    content = torch.arange(50000, dtype=torch.int32).view(torch.uint8)
    (tmp_path / "file").write_bytes(bytes(100) + content.numpy().tobytes())
    tensor, pages = map_bytes(tmp_path / "file", 100, content.numel())
    assert torch.equal(tensor, content) and pages.drop() and resident(tmp_path / "file") == 0
    assert torch.equal(tensor, content), "read again"
    tensor[70000] = 7
    assert not pages.drop() and tensor[70000] == 7
    assert (tmp_path / "file").read_bytes()[100:] == content.numpy().tobytes()
    del tensor
    assert not pages.drop() and resident(tmp_path / "file") == 0, "the mapping goes with its tensor"


def test_locked_pages_are_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    tensor, pages = map_bytes(tmp_path / "file", 0, 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    on_fault = ctypes.c_uint(1)  # MLOCK_ONFAULT: without it the system copies pages of a private mapping
    if libc.mlock2(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(4096), on_fault):
        pytest.skip(f"no memory can be locked here: {os.strerror(ctypes.get_errno())}")
    assert not tensor.any() and not pages.drop()


def test_a_pickled_model_owns_its_bytes(directory: Path) -> None:
    model = load_packed_model(directory)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(IDS).logits, model(IDS).logits)
    embedding = twin.model.embed_tokens.weight
    assert find_pages(model.model.embed_tokens.weight) is not None and find_pages(embedding) is None


@native
def test_changed_bytes_are_used_and_kept(directory: Path) -> None:
    model = load_packed_model(directory)
    layer, x = layers(model)[0], torch.randn(3, 512)
    before = [layer(x) for _ in range(3)][-1]
    other = layer.format.pack(torch.randn(layer.out_features, layer.in_features))
    layer.set_packed(other)
    expected = layer.to_linear(torch.float32)(x)
    after = [layer(x) for _ in range(3)][-1]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.unpack(), layer.format.unpack(other)), "the written pages were not dropped"
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), after)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_holds_a_shared_embedding_once(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 16384, "max_position_embeddings": 64}
    wide: Any = build("llama", tie_word_embeddings=True, **sizes).to(dtype)
    wide.save_pretrained(tmp_path / "wide")
    write_packed_directory(tmp_path / "wide", tmp_path / "packed", "int4_g128")
    file = tmp_path / "packed" / "model.safetensors"
    while_packed: list[int] = []
    plain_take = packed_gemm.take_panels

    def take(nbytes: int, fill: Any) -> torch.Tensor:
        panels = plain_take(nbytes, fill)
        while_packed.append(resident(file))
        return panels

    monkeypatch.setattr(packed_gemm, "take_panels", take)
    options: dict[str, Any] = {"kv_cache_tokens": 256, "max_sequences": 4, "max_tokens_per_step": 128}
    with LLM(tmp_path / "packed", skip_tokenizer_init=True, activations="float", **options) as llm:
        runner = llm.engine.runner
        assert while_packed and max(while_packed) < 0.05 * file.stat().st_size, "each part goes when it is packed"
        prompts = torch.randperm(16384, generator=torch.Generator().manual_seed(0))[:120].view(4, 30).tolist()
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, logprobs=2))
        held = runner._packed.nbytes + sum(p.nbytes for p in runner.model.parameters() if not p.is_meta)
        assert held + resident(file) < 1.05 * file.stat().st_size
        assert runner.program is not None and "aten.index.Tensor" in runner.program.operators
    twin = load_packed_model(tmp_path / "packed")
    for name, module in list(twin.named_modules()):
        if isinstance(module, PackedLinear):
            twin.set_submodule(name, module.to_linear(dtype))
    if dtype == torch.float32:
        assert_greedy(twin, outputs)
    table = twin.get_input_embeddings().weight
    with torch.no_grad():
        ids = torch.tensor([[0, 16383, 77], [5, 15, 16]])
        assert torch.equal(runner.model.get_input_embeddings()(ids), table[ids])


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_holds_unpacked_weights_of_a_file_once(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 4096, "max_position_embeddings": 64}
    wide: Any = build("llama", tie_word_embeddings=tied, **sizes).to(dtype)
    wide.save_pretrained(tmp_path / "wide")
    file = tmp_path / "wide" / "model.safetensors"
    options: dict[str, Any] = {"kv_cache_tokens": 256, "max_sequences": 4, "max_tokens_per_step": 128, "dtype": dtype}
    with LLM(tmp_path / "wide", skip_tokenizer_init=True, activations="float", **options) as llm:
        runner = llm.engine.runner
        outputs = llm.generate([IDS[0].tolist()], SamplingParams(temperature=0, max_tokens=6, logprobs=2))
        embedding = runner.model.get_input_embeddings().weight
        assert embedding.is_meta == tied
        held = runner._packed.nbytes + (0 if tied else embedding.nbytes)
        assert held > 0.95 * file.stat().st_size
        faults = 2 * FAULT_BYTES * len(list(wide.parameters()))  # a page fault also maps pages of the next weight
        assert runner._packed.nbytes + resident(file) < file.stat().st_size + faults
        row = wide.get_input_embeddings().weight[77]
        assert torch.equal(runner.model.get_input_embeddings()(torch.tensor(77)), row)
    if dtype == torch.float32:
        assert_greedy(wide, outputs)


def test_only_views_of_files_are_recorded_as_mapped(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    mapped = torch.from_file(str(tmp_path / "file"), shared=False, size=1 << 14)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    anonymous = torch.frombuffer(mmap.mmap(-1, 1 << 16, flags=flags), dtype=torch.float32)
    plain, view = torch.zeros(1 << 14), mapped[100:9000]
    for one in (mapped, view, anonymous, plain, torch.empty(4, device="meta")):
        parameter = torch.nn.Parameter(one, requires_grad=False)
        record_mapped_parameters([parameter])
        assert (find_pages(parameter) is not None) == (one is mapped or one is view)
    assert not view.any() and resident(tmp_path / "file") > 0
    parameter = torch.nn.Parameter(mapped, requires_grad=False)
    record_mapped_parameters([parameter])
    drop_pages(parameter)
    assert resident(tmp_path / "file") == 0
