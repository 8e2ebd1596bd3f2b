"""Test that kernels in one native run give bitwise the same results as calls of the kernels one by one."""

from __future__ import annotations

import pytest
import torch

from windlass.kernels.fused_layers import gated_activation, rms_norm
from windlass.kernels.inference_path import get_inference_path, list_inference_paths
from windlass.kernels.packed_gemm import pack_panels, pack_weight, packed_linear
from windlass.kernels.paged_attention import make_kv_cache, paged_attention, write_kv
from windlass.kernels.weight_format import get_weight_format

NATIVE = [name for name in list_inference_paths() if name != "reference"]


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_run_has_the_bits_of_its_kernels(path: str, dtype: torch.dtype) -> None:
    found = get_inference_path(path)
    assert found.module is not None
    most, features, threads = 40, 48, torch.get_num_threads()
    is_bf16 = dtype == torch.bfloat16
    x, y, weight = torch.randn(most, features), torch.randn(most, features), torch.rand(features)
    x, y = x.to(dtype), y.to(dtype)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    product, gated = torch.empty(most, 96, dtype=dtype), torch.empty(most, features, dtype=dtype)
    last = torch.empty(most, 32, dtype=dtype)
    up, head = pack_weight(torch.randn(96, features), path=path), pack_weight(torch.randn(32, features), path=path)
    program = found.module.StepProgram(found.number)
    per_token = (1, 0)
    program.add_sum(x.data_ptr(), y.data_ptr(), total.data_ptr(), is_bf16, (features, 0))
    program.add_rms_norm(total.data_ptr(), weight.data_ptr(), normed.data_ptr(), is_bf16, per_token, features, 1e-6)
    program.add_linear(*_fixed(up), normed.data_ptr(), product.data_ptr(), per_token, is_bf16, False)
    program.add_gated_activation(0, product.data_ptr(), gated.data_ptr(), is_bf16, per_token, features)
    program.add_linear(*_fixed(head), gated.data_ptr(), last.data_ptr(), (0, 1), is_bf16, False)
    for tokens, rows in ((1, 1), (17, 3), (most, 0), (most, most)):
        last.fill_(-1)
        program.run(tokens, rows, 1, threads)
        assert torch.equal(total[:tokens], x[:tokens] + y[:tokens])
        expected = packed_linear(rms_norm(total[:tokens], weight, 1e-6, path=path), up)
        assert torch.equal(product[:tokens], expected)
        expected = packed_linear(gated_activation(expected, "silu", path=path)[:rows], head)
        assert torch.equal(last[:rows], expected)
        assert last[rows:].eq(-1).all()
    with pytest.raises(ValueError, match="a step needs tokens"):
        program.run(0, 0, 1, threads)


@pytest.mark.parametrize("path", NATIVE)
def test_attention_reads_queries_keys_and_values_of_one_product(path: str) -> None:
    found = get_inference_path(path)
    assert found.module is not None
    heads, kv_heads, dim, tokens = 4, 2, 16, 21
    joined = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    query, key, value = joined.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    tables = [torch.tensor([[1, 3], [2, 0]], dtype=torch.int32), torch.tensor([0, 4, tokens], dtype=torch.int32)]
    lengths = torch.tensor([4, 17], dtype=torch.int32)
    slots = torch.cat([torch.arange(16, 20), torch.arange(32, 48), torch.arange(0, 1)])
    caches = [make_kv_cache(4, 16, kv_heads, dim, dim, torch.float32, path=path) for _ in range(2)]
    write_kv(caches[0], key.unflatten(1, (-1, dim)), value.unflatten(1, (-1, dim)), slots)
    expected = paged_attention(query.unflatten(1, (-1, dim)), caches[0], tables[0], tables[1], lengths)
    out = torch.empty(tokens, heads, dim)
    program = found.module.StepProgram(found.number)
    stride = joined.shape[1]
    places = (query.data_ptr(), stride, key.data_ptr(), stride, value.data_ptr(), stride)
    pointers = (slots.data_ptr(), tables[0].data_ptr(), 2, tables[1].data_ptr(), lengths.data_ptr())
    options = (dim**-0.5, 0.0, 0, 0, 0)
    program.add_attention(caches[1].handle, *places, out.data_ptr(), False, heads, *pointers, *options)
    program.run(tokens, 0, 2, torch.get_num_threads())
    assert torch.equal(out, expected)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_threads_of_a_step_share_its_products_and_outlive_an_error(is_bf16: bool) -> None:
    found = get_inference_path(NATIVE[0]) if NATIVE else pytest.skip("there are no native kernels")
    assert found.module is not None
    tokens, features, outputs, kv_heads, dim = 13, 130, 700, 2, 16
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    first = pack_weight(torch.randn(outputs, features), "bf16" if is_bf16 else "fp32", path=found.name)
    second = pack_weight(torch.randn(features, outputs), path=found.name)
    x, middle = torch.randn(tokens, features).to(dtype), torch.empty(tokens, outputs, dtype=dtype)
    out, heads_out = torch.empty(tokens, features, dtype=dtype), torch.empty(tokens, kv_heads, dim, dtype=dtype)
    cache = make_kv_cache(2, 16, kv_heads, dim, dim, dtype, path=found.name)
    slots, starts = torch.arange(tokens), torch.tensor([0, tokens], dtype=torch.int32)
    table, lengths = torch.tensor([[0]], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    program = found.module.StepProgram(found.number)
    program.add_linear(*_fixed(first), x.data_ptr(), middle.data_ptr(), (1, 0), is_bf16, False)
    places = (middle.data_ptr(), outputs) * 3
    pointers = (slots.data_ptr(), table.data_ptr(), 1, starts.data_ptr(), lengths.data_ptr())
    program.add_attention(
        cache.handle, *places, heads_out.data_ptr(), is_bf16, kv_heads, *pointers, dim**-0.5, 0.0, 0, 0, 0
    )
    program.add_linear(*_fixed(second), middle.data_ptr(), out.data_ptr(), (1, 0), is_bf16, False)
    expected = packed_linear(packed_linear(x, first), second)
    for threads in (1, 2, 5):
        slots[-1] = 32
        with pytest.raises(ValueError, match="slot 32 of token 12 is beyond a cache of 2 blocks"):
            program.run(tokens, 0, 1, threads)
        slots[-1] = tokens - 1
        for _ in range(20):
            out.fill_(-1)
            program.run(tokens, 0, 1, threads)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("name", ["int8_g32", "int4_g32_zp", "ternary", "binary_g128"])
def test_a_native_run_multiplies_low_bit_codes(name: str, quantizes: bool, dtype: torch.dtype, path: str) -> None:
    found = get_inference_path(path)
    assert found.module is not None
    most, features = 1100, 160  # more rows than are computed at once
    is_bf16, bias = dtype == torch.bfloat16, torch.randn(72)
    x = torch.randn(most, features).to(dtype)
    middle, out = torch.empty(most, 72, dtype=dtype), torch.empty(most, 40, dtype=dtype)
    form = get_weight_format(name)
    first, second = (
        pack_panels(form.pack(torch.randn(size)), form, size, quantize_inputs=quantizes, path=path)
        for size in ((72, features), (40, 72))
    )
    program, kept = found.module.StepProgram(found.number), []
    for panels, offset, source, target, count in (
        (first, bias, x, middle, (1, 0)),
        (second, None, middle, out, (0, 1)),
    ):
        product = panels.foreign_product(offset, is_bf16)
        assert product is not None
        kept.append(product[2])
        program.add_foreign_product(*product[:2], product[2].address, source.data_ptr(), target.data_ptr(), count)
    for tokens, rows in ((1, 1), (13, 5), (most, most), (3, 0)):
        expected = packed_linear(x[:tokens], first, bias)
        last = packed_linear(expected[:rows].contiguous(), second) if rows else out[:0]
        for threads in (1, 2, 5):
            middle.fill_(-1)
            out.fill_(-1)
            program.run(tokens, rows, 1, threads)
            assert torch.equal(middle[:tokens], expected)
            assert torch.equal(out[:rows], last)
            assert out[rows:].eq(-1).all()


def test_threads_that_prefetch_low_bit_weights_change_no_product() -> None:
    found = get_inference_path(NATIVE[0]) if NATIVE else pytest.skip("there are no native kernels")
    assert found.module is not None
    sizes = [(3072, 640), (640, 3072)] * 3  # large enough that several threads share a product
    form, x = get_weight_format("int8_g32"), torch.randn(1, 640)
    program, kept, source, expected = found.module.StepProgram(found.number), [], x, x
    for size in sizes:
        panels = pack_panels(form.pack(torch.randn(size) / 32), form, size, quantize_inputs=True, path=found.name)
        product, target = panels.foreign_product(None, False), torch.empty(1, size[0])
        assert product is not None
        program.add_foreign_product(*product[:2], product[2].address, source.data_ptr(), target.data_ptr(), (1, 0))
        kept += [panels, product[2], source]
        source, expected = target, packed_linear(expected, panels)
    for threads, runs in ((2, 1500), (5, 200)):  # threads that shared a buffer met within a thousand runs
        for _ in range(runs):
            source.fill_(-1)
            program.run(1, 0, 1, threads)
            assert torch.equal(source, expected)


@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_run_copies_rows_and_normalizes_heads(path: str, dtype: torch.dtype) -> None:
    found = get_inference_path(path)
    assert found.module is not None
    most, heads, dim, gap = 70, 3, 20, 7
    is_bf16, width = dtype == torch.bfloat16, heads * dim + gap
    table = torch.randn(9, width).to(dtype)
    index, rows = torch.randint(9, (most,)), torch.randint(2, (most,))
    x, weight = torch.zeros(most, width, dtype=dtype), torch.rand(dim)
    normed, last = torch.zeros(most, heads * dim, dtype=dtype), torch.zeros(most, width, dtype=dtype)
    program = found.module.StepProgram(found.number)
    size = table.element_size()
    program.add_gather(table.data_ptr(), width * size, (0, 0), 9, index.data_ptr(), x.data_ptr(), (1, 0))
    begin = x.data_ptr() + gap * size
    program.add_rms_norm(begin, weight.data_ptr(), normed.data_ptr(), is_bf16, (heads, 0), dim, 1e-6, heads, width)
    program.add_gather(x.data_ptr(), width * size, (1, 0), 0, rows.data_ptr(), last.data_ptr(), (0, 1))
    for tokens, chosen in ((2, 1), (most, most), (5, 0)):
        last.fill_(-1)
        program.run(tokens, chosen, 1, 2)
        assert torch.equal(x[:tokens], table[index[:tokens]])
        parts = x[:tokens, gap:].unflatten(1, (heads, dim))
        assert torch.equal(normed[:tokens], rms_norm(parts, weight, 1e-6, path=path).flatten(1))
        assert torch.equal(last[:chosen], x[rows[:chosen]])
        assert last[chosen:].eq(-1).all()
    for wrong, place in ((index, 9), (index, -1), (rows, 2)):
        before, wrong[0] = wrong[0].item(), place
        with pytest.raises(ValueError, match=f"index {place} is beyond a table of"):
            program.run(2, 1, 1, 2)
        wrong[0] = before
    with pytest.raises(ValueError, match="whole tokens that do not overlap"):
        found.module.rms_norm(found.number, begin, 0, begin, begin, is_bf16, 6, dim, 1e-6, 1, heads, dim)


def _fixed(panels: object) -> tuple[int, ...]:
    fixed = panels.native_weight(None)  # type: ignore[attr-defined]
    assert fixed is not None
    return fixed
