"""Linear layers of ggml, llama.cpp's tensor library, by its C interface: a rival of quant.py."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Numbers of `enum ggml_type`.
_TYPES = {"Q8_0": 8, "Q4_0": 2, "Q4_K": 12, "Q2_K": 10, "TQ2_0": 35, "TQ1_0": 34, "Q1_0": 41}
_REPACKED = ("Q4_0", "Q4_K", "Q2_K")  # types that ggml repacks on x86
_pointer = ctypes.c_void_p
_size = ctypes.c_size_t
_long = ctypes.c_int64


class _InitParams(ctypes.Structure):
    _fields_ = [("size", _size), ("buffer", _pointer), ("no_alloc", ctypes.c_bool)]


class GgmlLibrary:
    """CPU backend of ggml.

    Args:
        folder: folder of libggml-base.so and libggml-cpu.so; None: that of llama-cpp-python.
        threads: threads of a product.
    """

    def __init__(self, folder: Path | None, threads: int) -> None:
        if folder is None:
            found = importlib.util.find_spec("llama_cpp")
            if found is None or found.origin is None:
                raise ImportError("ggml: pip install llama-cpp-python, or give --ggml FOLDER")
            folder = Path(found.origin).parent / "lib"
        names = ("libggml-base.so", "libggml-cpu.so")
        self._libraries = [ctypes.CDLL(str(folder.resolve() / name), ctypes.RTLD_GLOBAL) for name in names]
        self._silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _pointer)(lambda *_: None)
        self._call("log_set", self._silent, None, result=None)
        self._backend = self._call("backend_cpu_init")
        self._call("backend_cpu_set_n_threads", self._backend, ctypes.c_int(threads), result=None)
        self._plain, self._repack = self._call("backend_cpu_buffer_type"), self._find_repack()

    def kinds(self, weight: torch.Tensor) -> list[tuple[str, int, _pointer]]:
        """Return name, type and buffer type of every kind of layer that this CPU computes for this weight."""
        found = [(name, kind, self._plain) for name, kind in _TYPES.items()]
        if self._repack is not None:
            found += [
                (f"{name} repacked", _TYPES[name], self._repack)
                for name in _REPACKED
                if self._multiplies(weight, _TYPES[name], self._repack)
            ]
        return found

    def bytes_of(self, weight: torch.Tensor, kind: int) -> int:
        """Return the bytes of a packed weight."""
        return len(weight) * int(self._call("row_size", kind, _long(weight.shape[1]), result=_size))

    def layer(self, weight: torch.Tensor, kind: int, where: _pointer, copies: int) -> Callable[[torch.Tensor], Any]:
        """Return a function that multiplies by `copies` copies of a weight in one graph, as a model does."""
        (rows, columns), weight = weight.shape, weight.contiguous()
        codes = torch.empty(self.bytes_of(weight, kind), dtype=torch.uint8)
        ends = _pointer(weight.data_ptr()), _pointer(codes.data_ptr())
        self._call("quantize_chunk", kind, *ends, _long(0), _long(rows), _long(columns), None, result=_size)
        held = self._call("init", _InitParams(8 << 20, None, True))
        weights = [self._call("new_tensor_2d", held, kind, _long(columns), _long(rows)) for _ in range(copies)]
        self._call("backend_alloc_ctx_tensors_from_buft", held, where)
        for one in weights:
            self._call("backend_tensor_set", one, *_span(codes), result=None)
        graphs: dict[int, tuple[Any, ...]] = {}

        def multiply(x: torch.Tensor) -> torch.Tensor:
            if len(x) not in graphs:
                graphs[len(x)] = self._graph(weights, x)
            graph, given, last = graphs[len(x)]
            out = torch.empty(len(x), rows)
            self._call("backend_tensor_set", given, *_span(x), result=None)
            self._call("backend_graph_compute", self._backend, graph, result=ctypes.c_int)
            self._call("backend_tensor_get", last, *_span(out), result=None)
            return out

        return multiply

    def _graph(self, weights: list[_pointer], x: torch.Tensor) -> tuple[Any, ...]:
        run = self._call("init", _InitParams(8 << 20, None, True))
        graph = self._call("new_graph", run)
        given = self._call("new_tensor_2d", run, 0, _long(x.shape[1]), _long(len(x)))
        results = [self._call("mul_mat", run, weight, given) for weight in weights]
        self._call("backend_alloc_ctx_tensors_from_buft", run, self._plain)
        for result in results:
            self._call("build_forward_expand", graph, result, result=None)
        return graph, given, results[-1]

    def _multiplies(self, weight: torch.Tensor, kind: int, where: _pointer) -> bool:
        # A CPU without a kernel for repacked rows accepts the buffer, and setting a tensor in it reads a null pointer.
        rows, columns = weight.shape
        held, run = (self._call("init", _InitParams(1 << 20, None, True)) for _ in range(2))
        packed = self._call("new_tensor_2d", held, kind, _long(columns), _long(rows))
        buffer = self._call("backend_alloc_ctx_tensors_from_buft", held, where)
        product = self._call("mul_mat", run, packed, self._call("new_tensor_2d", run, 0, _long(columns), _long(1)))
        able = self._call("backend_dev_supports_op", self._device(), product, result=ctypes.c_bool)
        self._call("backend_buffer_free", buffer, result=None)
        for one in (held, run):
            self._call("free", one, result=None)
        return bool(able)

    def _device(self) -> _pointer:
        return self._call("backend_reg_dev_get", self._call("backend_cpu_reg"), _size(0))

    def _find_repack(self) -> _pointer | None:
        registry = self._call("backend_cpu_reg")
        name = b"ggml_backend_dev_get_extra_bufts"
        address = self._call("backend_reg_get_proc_address", registry, name).value
        if not address:
            return None
        types = ctypes.CFUNCTYPE(ctypes.POINTER(_pointer), _pointer)(address)(self._device())
        for one in types:
            if not one:
                return None
            if self._call("backend_buft_name", _pointer(one), result=ctypes.c_char_p) == b"CPU_REPACK":
                return _pointer(one)
        return None

    def _call(self, name: str, *values: Any, result: Any = _pointer) -> Any:
        function = next(getattr(one, f"ggml_{name}") for one in self._libraries if hasattr(one, f"ggml_{name}"))
        function.restype = result
        returned = function(*values)
        return _pointer(returned) if result is _pointer else returned


def _span(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _pointer(tensor.data_ptr()), _size(0), _size(tensor.nbytes)
