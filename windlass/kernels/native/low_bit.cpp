// The module windlass.kernels._low_bit: products of packed codes of 1 to 8 bits on raw addresses, linked against nothing
// but Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "low_bit_job.hpp"
#include "kernel_sets.hpp"
#include "parallel.hpp"
#include "shared_ranges.hpp"

namespace nb = nanobind;

namespace windlass {
namespace {

constexpr std::int64_t kPanelsAtOnce = 8;        // panels of a part of many rows: the sums stay in the L2 cache
constexpr std::int64_t kRowsAtOnce = 1020;       // rows computed at once, so that their packed input is small
constexpr std::int64_t kPartsOfThread = 8;       // parts of a product: a delayed thread leaves its parts to the others
constexpr std::int64_t kSerialPack = 64 << 10;   // bytes of packed input below which one thread packs it
constexpr std::int64_t kSerialLines = 64 << 10;  // bytes of codes that one thread multiplies before a second one starts
constexpr std::int64_t kPieceBytes = 16 << 10;   // bytes of codes that a thread takes at once from a range

const std::vector<NamedSet<LowBitSet>>& supported_sets() {
#if defined(__x86_64__)
    static const auto found = find_sets(BuiltSets<LowBitSet>{
        .baseline = &kLowBitBaseline,
        .avx2 = &kLowBitAvx2,
#if defined(WINDLASS_HAS_AVX_VNNI)
        .avx_vnni = &kLowBitAvxVnni,
#endif
        .avx512 = &kLowBitAvx512,
        .avx512_vnni = &kLowBitAvx512Vnni,
        .avx512_bf16 = &kLowBitAvx512Vnni});  // no product of codes uses bf16
#else
    static const auto found = find_sets(BuiltSets<LowBitSet>{&kLowBitBaseline});
#endif
    return found;
}

std::vector<std::string> instruction_sets() { return names_of(supported_sets()); }

LowBitJob make_job(int codes, std::int64_t outputs, std::int64_t features) {
    refuse(codes < 1 || codes > 9 || (codes > 4 && codes < 8), "there are no such codes");
    refuse(outputs <= 0 || features <= 0, "codes need sizes above 0");
    LowBitJob job{};
    job.codes = static_cast<Codes>(codes);
    job.outputs = outputs;
    job.features = features;
    job.span_units = kGroupUnits;
    return job;
}

std::int64_t panel_bytes(int codes, std::int64_t outputs, std::int64_t features) {
    const LowBitJob job = make_job(codes, outputs, features);
    return job.num_panels() * job.panel_bytes();
}

// Writes the code of feature `i` of a unit into its lines, which are 0 there.
void put_code(Codes codes, unsigned code, std::int64_t lane, std::int64_t i, std::uint8_t* unit) {
    const std::int64_t step = i / 4, byte = lane * 4 + i % 4;
    const auto put = [&](std::int64_t line, unsigned value, std::int64_t shift) {
        unit[line * kStepBytes + byte] |= static_cast<std::uint8_t>(value << shift);
    };
    switch (codes) {
        case Codes::one:
            return put(0, code, step);
        case Codes::two:
            return put(step / 4, code, step % 4 * 2);
        case Codes::three:
            put(step / 4, code & 3, step % 4 * 2);
            return put(2, code >> 2, step);
        case Codes::four:
            return put(step / 2, code, step % 2 * 4);
        default:
            return put(step, code, 0);
    }
}

// Packs the codes of a file. A code in the file has the bits of `codes`; with `trits` a byte has 5 digits of base 3.
void pack(int codes, bool trits, std::uint64_t from, std::int64_t row_bytes, std::int64_t outputs,
          std::int64_t features, std::uint64_t panels, int threads) {
    const LowBitJob job = make_job(codes, outputs, features);
    const int bits = job.codes == Codes::float8 ? 8 : lines_of(job.codes);
    refuse(from == 0 || panels == 0 || threads <= 0, "codes to be packed need addresses and threads");
    refuse(trits && job.codes != Codes::two, "digits of base 3 become codes of two bits");
    refuse(row_bytes < (trits ? (features + 4) / 5 : (features * bits + 7) / 8), "a row of codes has too few bytes");
    const CodeRows rows{reinterpret_cast<const std::uint8_t*>(from), row_bytes, trits, bits};
    const nb::gil_scoped_release released;
    run_parallel(threads, static_cast<int>(job.num_panels()), [&](int panel) {
        auto* to = reinterpret_cast<std::uint8_t*>(panels) + panel * job.panel_bytes();
        std::memset(to, 0, job.panel_bytes());
        for (std::int64_t lane = 0; lane < kPanel && panel * kPanel + lane < outputs; ++lane) {
            for (std::int64_t feature = 0; feature < features; ++feature) {
                put_code(job.codes, rows.at(panel * kPanel + lane, feature), lane, feature % kUnit,
                         to + feature / kUnit * kStepBytes * lines_of(job.codes));
            }
        }
    });
}

// Threads of a product with `blocks` blocks of rows.
int threads_of(const LowBitJob& job, std::int64_t blocks, int threads) {
    return job.num_panels() * job.panel_bytes() * blocks < kSerialLines ? 1 : threads;
}

// True if a product streams its codes once, without sums between slices: then each thread has a range of panels.
bool is_streamed(const LowBitSet& set, const LowBitJob& job) { return set.tile_bytes(job, 1, 1) == 0; }

int ranges_of(int threads) { return std::min(threads, SharedRanges::kMost); }

// Panels of which ranges have multiples: a group, or a quarter of it if a thread has few groups. Threads with one group
// less would wait long, or get none.
std::int64_t range_unit(const LowBitSet& set, const LowBitJob& job, int ranges) {
    const std::int64_t group = set.panel_group(job);
    return group < 4 || job.num_panels() >= 4 * group * ranges ? group : group / 4;
}

// Divides panels among threads: part i is panels [bounds[i], bounds[i + 1]). Returns the number of bands into which the
// `blocks` blocks of rows are divided too.
std::int64_t divide_product(const LowBitSet& set, const LowBitJob& job, std::int64_t blocks, int threads,
                            std::vector<std::int64_t>& bounds) {
    const std::int64_t panels = job.num_panels(), group = set.panel_group(job);
    const std::int64_t groups = (panels + group - 1) / group;
    divide_guided(panels, group, threads, kPanelsAtOnce, bounds);
    const auto chunks = static_cast<std::int64_t>(bounds.size()) - 1;
    // Rows are divided too where there are fewer groups of outputs than threads could take.
    const std::int64_t wanted = (threads * kPartsOfThread + chunks - 1) / chunks;
    return threads == 1 || groups >= 4 * threads ? 1 : std::min(wanted, blocks);
}

void multiply_all(const LowBitSet& set, const LowBitJob& job, int threads, ParallelLoop loop) {
    static thread_local Scratch scratch;
    static thread_local std::vector<RowBlock> blocks;
    blocks.resize(job.rows);
    std::int64_t bytes = 0;
    const std::int64_t number = set.divide_rows(job, blocks.data(), &bytes);
    char* packed = scratch.get(bytes);
    const RowBlock* divided = blocks.data();
    loop(bytes < kSerialPack ? 1 : threads, static_cast<int>(number),
         [&](int block) { set.pack_rows(job, divided[block], packed); });

    const int used = threads_of(job, number, threads);
    if (is_streamed(set, job)) {
        static thread_local SharedRanges kept_ranges;
        SharedRanges& ranges = kept_ranges;
        const std::int64_t group = set.panel_group(job);
        const std::int64_t piece = std::max<std::int64_t>(1, kPieceBytes / (group * job.panel_bytes())) * group;
        const int count = ranges_of(used);
        ranges.divide(job.num_panels(), range_unit(set, job, count), count);
        return loop(used, count, [&](int thread) {
            ranges.take_all(thread, piece, [&](std::int64_t begin, std::int64_t end) {
                set.multiply(job, divided, 0, number, packed, begin, end, nullptr);
            });
        });
    }
    static thread_local std::vector<std::int64_t> kept;
    std::vector<std::int64_t>& bounds = kept;
    const std::int64_t bands = divide_product(set, job, number, used, bounds);
    const auto chunks = static_cast<std::int64_t>(bounds.size()) - 1;
    loop(used, static_cast<int>(chunks * bands), [&](int part) {
        static thread_local Scratch tiles;
        const std::int64_t chunk = part / bands, band = part % bands;
        const std::int64_t first = number * band / bands, last = number * (band + 1) / bands;
        const std::int64_t begin = bounds[chunk], end = bounds[chunk + 1];
        set.multiply(job, divided, first, last, packed, begin, end,
                     tiles.get(set.tile_bytes(job, last - first, end - begin)));
    });
}

// A weight and how its inputs are rounded: y = x @ ((codes - zeros - shifts) * group_scales * scales).T + bias.
struct LowBitWeight {
    const LowBitSet& set;
    LowBitJob job;  // without rows

    void multiply(const void* x, void* y, std::int64_t rows, int threads, ParallelLoop loop) const {
        LowBitJob part = job;
        const std::int64_t width = job.is_bf16 ? 2 : 4;
        for (std::int64_t first = 0; first < rows; first += kRowsAtOnce) {
            part.rows = std::min(kRowsAtOnce, rows - first);
            part.x = static_cast<const char*>(x) + first * job.features * width;
            part.y = static_cast<char*>(y) + first * job.outputs * width;
            multiply_all(set, part, threads, loop);
        }
    }
};

void multiply_foreign(const void* weight, const void* x, void* y, std::int64_t rows, int threads, ParallelLoop loop) {
    static_cast<const LowBitWeight*>(weight)->multiply(x, y, rows, threads, loop);
}

FirstPart find_first_part(const void* weight, std::int64_t rows, int thread, int threads) {
    // Not those of `multiply_all`: a thread that waits for the end of one product asks for its part of the next one.
    static thread_local std::vector<RowBlock> blocks;
    static thread_local std::vector<std::int64_t> bounds;
    const LowBitWeight& found = *static_cast<const LowBitWeight*>(weight);
    LowBitJob job = found.job;
    job.rows = std::min(kRowsAtOnce, rows);
    blocks.resize(job.rows);
    std::int64_t bytes = 0;
    const std::int64_t number = found.set.divide_rows(job, blocks.data(), &bytes);
    const std::int64_t group = found.set.panel_group(job);
    const int used = threads_of(job, number, threads);
    if (thread >= used) return {};
    std::int64_t begin = 0, end = 0;
    if (is_streamed(found.set, job)) {
        const int ranges = ranges_of(used);
        if (thread >= ranges) return {};
        const std::int64_t unit = range_unit(found.set, job, ranges);
        begin = SharedRanges::first_item(job.num_panels(), unit, ranges, thread);
        end = SharedRanges::first_item(job.num_panels(), unit, ranges, thread + 1);
    } else {
        if (divide_product(found.set, job, number, used, bounds) > 1) return {};
        if (thread + 1 >= static_cast<int>(bounds.size())) return {};
        begin = bounds[thread], end = bounds[thread + 1];
    }
    return {job.panels + begin * job.panel_bytes(), job.panel_bytes(), static_cast<int>(std::min(end - begin, group))};
}

// An address of 0: there is no such tensor.
LowBitWeight make_weight(int set, int codes, std::uint64_t panels, std::int64_t outputs, std::int64_t features,
                         std::int64_t group, std::uint64_t group_scales, std::uint64_t zeros, int zero,
                         std::uint64_t wide_scales, std::uint64_t shifts, std::uint64_t scales, std::uint64_t bias,
                         bool is_bf16, bool codes_inputs) {
    LowBitJob job = make_job(codes, outputs, features);
    refuse(group != 32 && group != 64 && group != 128, "a group has 32, 64 or 128 features");
    refuse(panels == 0, "a product needs the address of the weight");
    refuse(panels % kStepBytes != 0, "packed codes begin at a multiple of 64 bytes");
    refuse(codes_inputs && job.codes == Codes::float8, "8-bit floats take float inputs");
    refuse(codes_inputs && (wide_scales != 0 || shifts != 0), "float32 scales and shifts of groups take float inputs");
    job.panels = reinterpret_cast<const char*>(panels);
    job.span_units = group / kUnit;
    job.group_scales = reinterpret_cast<const std::uint16_t*>(group_scales);
    job.zeros = reinterpret_cast<const std::uint8_t*>(zeros);
    job.zero = zero;
    job.wide_scales = reinterpret_cast<const float*>(wide_scales);
    job.shifts = reinterpret_cast<const float*>(shifts);
    job.scales = reinterpret_cast<const float*>(scales);
    job.bias = reinterpret_cast<const float*>(bias);
    job.is_bf16 = is_bf16;
    job.codes_inputs = codes_inputs;
    return {set_at(supported_sets(), set), job};
}

void linear(int set, int codes, std::uint64_t panels, std::int64_t outputs, std::int64_t features, std::int64_t group,
            std::uint64_t group_scales, std::uint64_t zeros, int zero, std::uint64_t wide_scales, std::uint64_t shifts,
            std::uint64_t scales, std::uint64_t bias, std::uint64_t x, std::uint64_t y, std::int64_t rows, bool is_bf16,
            int threads, bool codes_inputs) {
    const LowBitWeight weight = make_weight(set, codes, panels, outputs, features, group, group_scales, zeros, zero,
                                            wide_scales, shifts, scales, bias, is_bf16, codes_inputs);
    refuse(x == 0 || y == 0, "a product needs the addresses of input and output");
    refuse(rows <= 0 || threads <= 0, "a product needs rows and threads above 0");
    const nb::gil_scoped_release released;
    weight.multiply(reinterpret_cast<const void*>(x), reinterpret_cast<void*>(y), rows, threads, run_parallel);
}

}  // namespace
}  // namespace windlass

NB_MODULE(_low_bit, module) {
    nb::set_leak_warnings(false);  // objects in use at the end of the interpreter are not errors
    using namespace nb::literals;
    module.def("instruction_sets", windlass::instruction_sets);
    module.def("panel_bytes", windlass::panel_bytes, "codes"_a, "outputs"_a, "features"_a);
    module.def("pack", windlass::pack, "codes"_a, "trits"_a, "codes_of_rows"_a, "row_bytes"_a, "outputs"_a,
               "features"_a, "panels"_a, "threads"_a);
    nb::class_<windlass::LowBitWeight>(module, "LowBitWeight")
        .def_prop_ro("address", [](const windlass::LowBitWeight& weight) {
            return reinterpret_cast<std::uint64_t>(&weight);
        });
    module.def("weight", windlass::make_weight, "instruction_set"_a, "codes"_a, "panels"_a, "outputs"_a, "features"_a,
               "group"_a, "group_scales"_a, "zeros"_a, "zero"_a, "wide_scales"_a, "shifts"_a, "scales"_a, "bias"_a,
               "is_bf16"_a, "codes_inputs"_a);
    module.attr("foreign_product") = reinterpret_cast<std::uint64_t>(&windlass::multiply_foreign);
    module.attr("first_part") = reinterpret_cast<std::uint64_t>(&windlass::find_first_part);
    module.def("linear", windlass::linear, "instruction_set"_a, "codes"_a, "panels"_a, "outputs"_a, "features"_a,
               "group"_a, "group_scales"_a, "zeros"_a, "zero"_a, "wide_scales"_a, "shifts"_a, "scales"_a, "bias"_a,
               "x"_a, "y"_a, "rows"_a, "is_bf16"_a, "threads"_a, "codes_inputs"_a);
}
