// Products of several blocks of rows with packed codes: a slice of a few panels is expanded once, to bytes, halves or
// floats, and stays in the first-level cache for all blocks.
#pragma once

#include "low_bit.hpp"

namespace {

// Writes `units` units of a panel as bytes.
template <Codes kCodes>
void expand_bytes(const char* from, std::int64_t units, char* to) {
    for (std::int64_t unit = 0; unit < units; ++unit) {
#pragma GCC unroll 8
        for (int step = 0; step < kUnitSteps; ++step) {
#pragma GCC unroll 4
            for (int part = 0; part < kVectors; ++part) {
                store(to + step * kStepBytes + part * sizeof(U), step_bytes<kCodes>(from + part * sizeof(U), step));
            }
        }
        from += kStepBytes * windlass::lines_of(kCodes);
        to += kStepBytes * kUnitSteps;
    }
}

// Writes units [begin, end) of kPanels panels as floats minus their zeros and shifts; a line is a feature.
template <Codes kCodes, int kPanels>
void expand_floats(const LowBitJob& job, const TilePlace<kPanels>& place, std::int64_t begin, std::int64_t end,
                   char* to) {
    constexpr std::int64_t kUnitBytes = kStepBytes * windlass::lines_of(kCodes);
    for (std::int64_t unit = begin; unit < end; ++unit) {
        F offsets[kPanels * kVectors], shifts[kPanels * kVectors];
        load_offsets<kPanels>(job, place, unit / job.span_units, magic_of<kCodes>(), offsets);
        load_shifts<kPanels>(place, unit / job.span_units, shifts);
#pragma GCC unroll 16
        for (int column = 0; column < kPanels * kVectors; ++column) {
            const char* from = place.lines[column / kVectors] + unit * kUnitBytes + column % kVectors * sizeof(U);
            char* line = to + column / kVectors * kFloatSlice * kUnit * kStepBytes + column % kVectors * sizeof(F);
#pragma GCC unroll 8
            for (int step = 0; step < kUnitSteps; ++step) {
                const U bytes = step_bytes<kCodes>(from, step);
#pragma GCC unroll 4
                for (int part = 0; part < 4; ++part) {
                    store(line + ((unit - begin) * kUnit + 4 * step + part) * kStepBytes,
                          code_float<kCodes>(bytes, part, offsets[column]) - shifts[column]);
                }
            }
        }
    }
}

// Adds units [begin, end) of kPanels panels of floats at `wide` to tile[row][output]; unit 0 sets it.
template <int kRows, int kPanels>
WINDLASS_INLINE void add_floats_to_tile(const LowBitJob& job, const TilePlace<kPanels>& place, const char* wide,
                                        const char* packed, std::int64_t begin, std::int64_t end,
                                        FetchPart<kPanels>& fetch, float* tile) {
    constexpr int kColumns = kPanels * kVectors;
    if (begin == 0) std::memset(tile, 0, 4 * kRows * kPanels * kPanel);
    const auto* x = reinterpret_cast<const float*>(packed) + begin * kUnit * kRows;
    for (std::int64_t at = begin; at < end; at += job.span_units) {
        const std::int64_t stop = at + job.span_units < end ? at + job.span_units : end;
        F sums[kRows][kColumns] = {};
        for (std::int64_t unit = at; unit < stop; ++unit) {
            fetch.template unit<1>(place.lines, 0);
            const char* lines = wide + (unit - begin) * kUnit * kStepBytes;
#pragma GCC unroll 2
            for (int i = 0; i < kUnit; ++i, x += kRows) {
                F weights[kColumns];
#pragma GCC unroll 16
                for (int column = 0; column < kColumns; ++column) {
                    weights[column] = load<F>(lines + column / kVectors * kFloatSlice * kUnit * kStepBytes +
                                              i * kStepBytes + column % kVectors * sizeof(F));
                }
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
                    const F spread = all(x[row]);
#pragma GCC unroll 16
                    for (int column = 0; column < kColumns; ++column) {
                        sums[row][column] = multiply_add(spread, weights[column], sums[row][column]);
                    }
                }
            }
        }
        add_span<kRows, kPanels>(place, at / job.span_units, sums, tile);
    }
}

// Adds the product of a block of kRows rows and a slice of bytes or floats; false if the block has another size.
template <bool kFloats, int kRows, int kPanels>
WINDLASS_INLINE bool add_low_slice_if(const LowBitJob& job, const RowBlock& block, const TilePlace<kPanels>& place,
                                      const char* wide, const char* packed, std::int64_t begin, std::int64_t end,
                                      FetchPart<kPanels>& fetch, float* tile) {
    if constexpr (kRows <= kMostRows) {
        if (block.padded != kRows) return false;
        if constexpr (kFloats) {
            add_floats_to_tile<kRows, kPanels>(job, place, wide, packed + block.offset, begin, end, fetch, tile);
            return true;
        }
        const auto add = [&](auto codes, auto bits) __attribute__((always_inline)) {
            add_bytes_to_tile<codes, bits, kRows, kPanels>(job, place, packed + block.offset, begin, end, fetch, tile);
        };
        using Bytes = std::integral_constant<Codes, Codes::eight>;
        if constexpr (is_widened_once<CodedStep>) {  // narrow sums hold the more units the fewer bits a code has
            if (job.codes == Codes::eight) {
                add(std::integral_constant<Codes, Codes::halves>{}, std::integral_constant<int, 16>{});
            } else if (job.codes <= Codes::two) {
                add(Bytes{}, std::integral_constant<int, 2>{});
            } else {
                add(Bytes{}, std::integral_constant<int, 4>{});
            }
        } else {
            add(Bytes{}, std::integral_constant<int, 8>{});
        }
        return true;
    }
    return false;
}

template <bool kFloats, int kPanels>
[[gnu::noinline]] void add_low_slice(const LowBitJob& job, const RowBlock& block, const TilePlace<kPanels>& place,
                                     const char* wide, const char* packed, std::int64_t begin, std::int64_t end,
                                     FetchPart<kPanels>& fetch, float* tile) {
    (void)(add_low_slice_if<kFloats, 1>(job, block, place, wide, packed, begin, end, fetch, tile) ||
           add_low_slice_if<kFloats, 2>(job, block, place, wide, packed, begin, end, fetch, tile) ||
           add_low_slice_if<kFloats, 4>(job, block, place, wide, packed, begin, end, fetch, tile) ||
           add_low_slice_if<kFloats, 6>(job, block, place, wide, packed, begin, end, fetch, tile) ||
           add_low_slice_if<kFloats, 8>(job, block, place, wide, packed, begin, end, fetch, tile) ||
           add_low_slice_if<kFloats, 12>(job, block, place, wide, packed, begin, end, fetch, tile));
}

// Floats of the tile of a block and kPanels panels.
template <int kPanels>
constexpr std::int64_t kLowTile = kMostRows * kPanels * kPanel;

// Multiplies several blocks: for each slice all panels, for each panel all blocks. So a slice of the input stays in the
// second-level cache, and a slice of the weight in the first-level cache. `tiles` has room for all panels and blocks.
template <bool kFloats, int kPanels>
void multiply_low_slices(const LowBitJob& job, const RowBlock* blocks, std::int64_t count, const char* packed,
                         std::int64_t begin, std::int64_t end, float* tiles) {
    constexpr std::int64_t kSlice = kFloats ? kFloatSlice : kByteSlice;
    constexpr std::int64_t kSteps = kFloats                       ? kUnit
                                    : is_widened_once<CodedStep> ? windlass::lines_of(Codes::halves)
                                                                 : kUnitSteps;  // lines of an expanded unit at most
    alignas(64) char wide[kPanels * kSlice * kSteps * kStepBytes];
    const std::int64_t slice = !kFloats && is_widened(job) ? kSlice / kPanels : kSlice;  // of halves, half as many
    const std::int64_t units = job.units(), panel_bytes = job.panel_bytes(), groups = (end - begin) / kPanels;
    const std::int64_t lines = windlass::lines_of(job.codes), last = begin + groups * kPanels;
    for (std::int64_t first = 0; first < units; first += slice) {
        const std::int64_t stop = first + slice < units ? first + slice : units;
        float* tile = tiles;
        for (std::int64_t panel = begin; panel < last; panel += kPanels) {
            TilePlace<kPanels> place(job, panel);
            TilePlace<kPanels> read = place;  // what the product reads
            with_codes(job.codes, [&](auto codes) {
                constexpr bool kWidens = codes == Codes::eight && is_widened_once<CodedStep>;
                constexpr bool kStays = !kWidens && (codes == Codes::eight || codes == Codes::float8);
                if constexpr (kFloats) {
                    expand_floats<codes, kPanels>(job, place, first, stop, wide);
                } else {
                    for (int i = 0; i < kPanels; ++i) {
                        const char* from = place.lines[i] + first * lines * kStepBytes;
                        read.lines[i] = from;
                        char* to = wide + i * kSlice * kSteps * kStepBytes;
                        if constexpr (kWidens) widen_steps<CodedStep>(from, (stop - first) * kUnitSteps, to);
                        if constexpr (!kWidens && !kStays) expand_bytes<codes>(from, stop - first, to);
                        if constexpr (!kStays) read.lines[i] = to;
                    }
                }
            });
            const bool is_last = panel + kPanels >= last;
            const char* next = job.panels + (is_last ? begin : panel + kPanels) * panel_bytes +
                               (is_last ? stop : first) * lines * kStepBytes;
            const std::int64_t wanted = is_last && stop == units ? 0 : slice * lines;
            for (std::int64_t i = 0; i < count; ++i, tile += kLowTile<kPanels>) {
                FetchPart<kPanels> fetch{next, panel_bytes, wanted * i / count, wanted * (i + 1) / count,
                                         (lines + count - 1) / count};
                add_low_slice<kFloats, kPanels>(job, blocks[i], read, wide, packed, first, stop, fetch, tile);
                if (stop == units) finish_rows_of<kPanels>(job, blocks[i], tile, panel * kPanel);
            }
        }
    }
    if constexpr (kPanels > 1) {
        if (last < end) multiply_low_slices<kFloats, kPanels / 2>(job, blocks, count, packed, last, end, tiles);
    }
}

}  // namespace
