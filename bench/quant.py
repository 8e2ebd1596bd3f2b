"""One linear layer in every weight format, with cold weights, compared with torch's fp32 and other libraries.

python bench/quant.py                    # 4096 -> 11008 and 768 -> 3072 at 1, 16 and 512 rows: some minutes
python bench/quant.py --shapes 768x3072 --rows 1 --formats int4_g128 --peers ""
python bench/quant.py --path AVX2        # windlass with another instruction set

`A8`: inputs rounded to int8. With up to 16 rows, as many copies of the layer as `--cold` megabytes hold are computed,
after a read of 128 MiB: ggml's in one graph, and those of `in a step` in one native run, as both engines decode; all
others by one call from Python for each copy. All contenders take turns; a figure is the best of its rounds, because
other processes only ever add time.
`of read` is GB/s divided by that of a read loop in the same run, `error` is |y - y_fp32| / |y_fp32| for Gaussian
weights and inputs. Rivals that are not installed are named and left out: `pip install onnx onnxruntime torchao
llama-cpp-python` (ggml).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from ggml_layer import GgmlLibrary
from rich.table import Table
from torch.nn import functional as F

from windlass.cli.benches.bench_console import bench_console
from windlass.cli.benches.bench_results import write_result
from windlass.kernels.huge_pages import empty_on_huge_pages
from windlass.kernels.inference_path import InferencePath, get_inference_path
from windlass.kernels.packed_gemm import PackedPanels, pack_panels, packed_linear
from windlass.kernels.weight_format import get_weight_format

_FORMATS = "int8,int8_g128,int4_g128,int4_g128_zp,int3_g128,int2_g128,ternary,binary_g128,fp8"
_PEERS = "bf16,fbgemm,onednn,onnxruntime,torchao,ggml"
_ROOF_BYTES, _COLD_ROWS = 600 << 20, 16
Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Contender:
    """Copies of a layer of one kind.

    Attributes:
        layers: copies of the layer, all with the same weight.
        nbytes: bytes of the weight of a copy.
        copies: number of copies that one call of an entry of `layers` computes if the input has few rows.
    """

    layers: list[Layer]
    nbytes: float
    copies: int = 1
    seconds: list[float] = field(default_factory=list)


def main(
    shapes: Annotated[str, typer.Option(help="IN x OUT, with commas.")] = "4096x11008,768x3072",
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas.")] = "1,16,512",
    formats: Annotated[str, typer.Option(help="Weight formats, with commas.")] = _FORMATS,
    peers: Annotated[str, typer.Option(help="Rivals, with commas.")] = _PEERS,
    floats: Annotated[bool, typer.Option(help="Measure float inputs too.")] = True,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    cold: Annotated[float, typer.Option(help="Megabytes of packed weights in a call of few rows.")] = 48,
    threads: Annotated[int, typer.Option(min=0, help="0: torch's number.")] = 0,
    path: Annotated[str, typer.Option(help="Instruction set; by default the best.")] = "",
    ggml: Annotated[Path | None, typer.Option(help="Folder of ggml's libraries; default: llama_cpp's.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the JSON file.")] = Path(__file__).parent / "results",
    name: Annotated[str, typer.Option(help="Name of the JSON file.")] = "quant",
) -> None:
    """Measure all contenders alternately."""
    if threads:
        torch.set_num_threads(threads)
    chosen = get_inference_path(path or None)
    module = chosen.module
    if module is None:
        raise typer.BadParameter("the native kernels are missing; reinstall windlass with a C++ compiler")
    console, measured = bench_console(), []
    memory = empty_on_huge_pages((_ROOF_BYTES,), torch.uint8).fill_(1)
    start = [
        _seconds(lambda: module.read_memory(chosen.number, memory.data_ptr(), _ROOF_BYTES, torch.get_num_threads()))
        for _ in range(5)
    ]
    read = _ROOF_BYTES / min(start) / 1e9
    capability = torch.backends.cpu.get_cpu_capability()
    console.print(
        f"windlass {chosen.name}, torch {capability}, {torch.get_num_threads()} threads; read {read:.1f} GB/s"
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao's quantized tensors are deprecated
        for shape in shapes.split(","):
            inputs, outputs = (int(size) for size in shape.split("x"))
            weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) / inputs**0.5
            contenders = {}
            for label, nbytes, make in _kinds(weight, formats, peers, floats, chosen.name):
                try:
                    contenders[label] = Contender([make() for _ in range(math.ceil(cold * 1e6 / nbytes))], nbytes)
                except Exception as problem:  # rivals raise errors of any class
                    console.print(f"left out: {label} at {shape}: {problem!r:.120}")
            contenders |= _own_steps(weight, formats, cold, chosen)
            if "ggml" in peers.split(","):
                try:
                    contenders |= _ggml_layers(weight, cold, ggml)
                except Exception as problem:
                    console.print(f"left out: ggml at {shape}: {problem!r:.120}")
            for count in (int(one) for one in rows.split(",")):
                x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
                exact, errors = F.linear(x, weight), {}
                for label, contender in contenders.items():
                    errors[label] = float((contender.layers[-1](x).float() - exact).norm() / exact.norm())
                _measure(contenders, x, rounds, memory if count <= _COLD_ROWS else None)
                results_here = _rows(contenders, errors, inputs, outputs, count, read)
                console.print(_table(f"{inputs} -> {outputs}, {count} rows", results_here))
                measured += results_here
    facts = {
        "path": chosen.name,
        "threads": torch.get_num_threads(),
        "torch": capability,
        "read_gb_per_s": read,
        "rows": measured,
    }
    write_result(results / f"{name}.json", facts)


def _kinds(
    weight: torch.Tensor, formats: str, peers: str, floats: bool, path: str
) -> Iterator[tuple[str, float, Callable[[], Layer]]]:
    """Yield name, bytes of the weight, and a function that makes one more copy of the layer."""
    yield "torch fp32", weight.nbytes, lambda: _plain(weight.clone())
    for name in filter(None, formats.split(",")):
        tensors = get_weight_format(name).pack(weight)
        for coded in (True, False) if floats and name != "fp8" else (name != "fp8",):
            packed = pack_panels(tensors, name, (weight.shape[0], weight.shape[1]), quantize_inputs=coded, path=path)
            label = f"windlass {name}" + (" A8" if coded else "")
            make = partial(_own, tensors, name, weight.shape, coded, path)
            yield label, packed.nbytes, make
    rivals: dict[str, tuple[float, Callable[[], Layer]]] = {
        "bf16": (weight.nbytes / 2, lambda: _plain(weight.to(torch.bfloat16, copy=True))),
        "fbgemm": (weight.nbytes / 4, lambda: _torch_ao(weight, "fbgemm")),
        "onednn": (weight.nbytes / 4, lambda: _torch_ao(weight, "onednn")),
        "torchao": (weight.nbytes / 4, lambda: _torchao(weight)),
    }
    for peer in filter(None, peers.split(",")):
        if peer in rivals:
            yield f"{peer} W8A8" if peer != "bf16" else "torch bf16", *rivals[peer]
        elif peer == "onnxruntime":
            yield "onnxruntime W8A8", weight.nbytes / 4, lambda: _onnx_dynamic(weight)
            for bits in (4, 2):
                size = weight.numel() * (bits / 8 + 4 / 32)
                yield f"onnxruntime W{bits}g32 A8", size, lambda bits=bits: _onnx_bits(weight, bits)  # type: ignore[misc]


def _ggml_layers(weight: torch.Tensor, cold: float, folder: Path | None) -> dict[str, Contender]:
    library, found = GgmlLibrary(folder, torch.get_num_threads()), {}
    for name, kind, where in library.kinds(weight):
        nbytes = library.bytes_of(weight, kind)
        copies = math.ceil(cold * 1e6 / nbytes)
        layers = [library.layer(weight, kind, where, count) for count in (copies, 1)]
        found[f"ggml {name}"] = Contender([_by_rows(*layers)], nbytes, copies)
    return found


def _by_rows(few: Layer, many: Layer) -> Layer:
    return lambda x: few(x) if len(x) <= _COLD_ROWS else many(x)


def _plain(weight: torch.Tensor) -> Layer:
    return lambda x: F.linear(x.to(weight.dtype), weight)


def _own(tensors: dict[str, torch.Tensor], name: str, shape: torch.Size, coded: bool, path: str) -> Layer:
    packed = pack_panels(tensors, name, (shape[0], shape[1]), quantize_inputs=coded, path=path)
    return lambda x: packed_linear(x, packed)


def _own_steps(weight: torch.Tensor, formats: str, cold: float, path: InferencePath) -> dict[str, Contender]:
    """Return windlass's layers with int8 inputs, all copies in one native run, as a model decodes."""
    found = {}
    for name in filter(None, formats.split(",")):
        tensors = get_weight_format(name).pack(weight)
        if name == "fp8":
            continue
        shape = weight.shape[0], weight.shape[1]
        make = partial(pack_panels, tensors, name, shape, quantize_inputs=True, path=path.name)
        packed = [make()]
        packed += [make() for _ in range(math.ceil(cold * 1e6 / packed[0].nbytes) - 1)]
        layer = _by_rows(_native_run(packed, path), partial(packed_linear, packed=packed[0]))
        found[f"windlass {name} A8 in a step"] = Contender([layer], packed[0].nbytes, len(packed))
    return found


def _native_run(packed: list[PackedPanels], path: InferencePath) -> Layer:
    runs: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}
    assert path.module is not None
    native, kept = path.module.StepProgram, [one.foreign_product(None, False) for one in packed]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in runs:
            run, given, out = native(path.number), torch.empty_like(x), torch.empty(len(x), packed[0].out_features)
            places = given.data_ptr(), out.data_ptr(), (len(x), 0)
            for one, foreign in zip(packed, kept, strict=True):
                if (fixed := one.native_weight(None)) is not None:
                    run.add_linear(*fixed, *places, False, one.quantize_inputs)
                elif foreign is not None:
                    run.add_foreign_product(*foreign[:2], foreign[2].address, *places)
            runs[len(x)] = run, given, out
        run, given, out = runs[len(x)]
        given.copy_(x)
        run.run(1, 0, 1, torch.get_num_threads())
        return out

    return multiply


def _torch_ao(weight: torch.Tensor, engine: str) -> Layer:
    from torch.ao.nn.quantized.dynamic import Linear

    torch.backends.quantized.engine = engine
    layer = Linear(weight.shape[1], weight.shape[0], bias_=False)
    scale = weight.abs().amax(1).double() / 127
    codes = torch.quantize_per_channel(weight, scale, torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8)
    layer.set_weight_bias(codes, None)
    return layer


def _torchao(weight: torch.Tensor) -> Layer:
    import torchao.quantization as ao

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    return ao.quantize_(layer, ao.Int8DynamicActivationInt8WeightConfig()) or layer


def _onnx_dynamic(weight: torch.Tensor) -> Layer:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    codes = (weight / scale).round().to(torch.int8).t().contiguous()
    return _onnx_session("DynamicQuantizeMatMul", {"q": codes, "s": scale.flatten()}, weight.shape, {})


def _onnx_bits(weight: torch.Tensor, bits: int) -> Layer:
    groups, top = weight.view(len(weight), -1, 32), 2 ** (bits - 1)
    scale = groups.abs().amax(2, True).clamp(min=1e-9) / (top - 0.5)
    codes = ((groups / scale).round().clamp(-top, top - 1) + top).to(torch.uint8)
    parts = codes.view(len(weight), groups.shape[1], -1, 8 // bits)
    packed = sum(parts[..., i] << (bits * i) for i in range(8 // bits))
    more = {"K": weight.shape[1], "N": len(weight), "bits": bits, "block_size": 32, "accuracy_level": 4}
    return _onnx_session("MatMulNBits", {"q": packed, "s": scale.flatten()}, weight.shape, more)


def _onnx_session(kind: str, tensors: dict[str, Any], shape: torch.Size, more: dict[str, int]) -> Layer:
    import onnx
    import onnxruntime

    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    constants = [onnx.numpy_helper.from_array(tensor.numpy(), name) for name, tensor in tensors.items()]
    node = helper.make_node(kind, ["x", *tensors], ["y"], domain="com.microsoft", **more)
    ends = value("x", 1, ["rows", shape[1]]), value("y", 1, ["rows", shape[0]])
    graph = helper.make_graph([node], "layer", [ends[0]], [ends[1]], constants)
    opset = helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    # Otherwise ONNX Runtime's threads spin while the next rival runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure(contenders: dict[str, Contender], x: torch.Tensor, rounds: int, memory: torch.Tensor | None) -> None:
    for contender in contenders.values():
        contender.seconds.clear()
    for number in range(rounds + 1):
        for contender in list(contenders.values())[:: -1 if number % 2 else 1]:
            layers = contender.layers if memory is not None else contender.layers[:1]
            for _ in range(2):  # the first call of a turn wakes the threads
                if memory is not None:
                    memory[: 128 << 20].view(torch.float32).sum()
                taken = _seconds(lambda layers=layers: [layer(x) for layer in layers])  # type: ignore[misc]
                if number:
                    contender.seconds.append(taken / len(layers) / (1 if memory is None else contender.copies))


def _rows(
    contenders: dict[str, Contender], errors: dict[str, float], inputs: int, outputs: int, count: int, read: float
) -> list[dict[str, Any]]:
    base = min(contenders["torch fp32"].seconds)
    found = []
    for name, contender in sorted(contenders.items(), key=lambda item: min(item[1].seconds)):
        best = min(contender.seconds)
        rate = contender.nbytes / best / 1e9
        found.append({
            "name": name, "inputs": inputs, "outputs": outputs, "rows": count, "microseconds": best * 1e6,
            "times_fp32": base / best, "gb_per_s": rate, "of_read": rate / read, "error": errors[name],
            "gops": 2 * count * inputs * outputs / best / 1e9, "bits": 8 * contender.nbytes / inputs / outputs,
            "spread": max(contender.seconds) / best,
        })  # fmt: skip
    return found


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, box=None)
    for name in ("layer", "us", "x fp32", "GB/s", "of read", "GOP/s", "bits", "error"):
        table.add_column(name, justify="left" if name == "layer" else "right")
    for row in rows:
        table.add_row(
            row["name"], f"{row['microseconds']:.0f}", f"{row['times_fp32']:.2f}", f"{row['gb_per_s']:.1f}",
            f"{row['of_read']:.0%}", f"{row['gops']:.0f}", f"{row['bits']:.2f}", f"{row['error']:.2g}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
