// Products of few rows of float inputs with packed codes, which are expanded in registers while they stream from
// memory.
#pragma once

#include "low_bit.hpp"

namespace {

template <Codes kCodes, int kRows, int kPanels, bool kTable, bool kShifted>
void multiply_float_tile(const LowBitJob& job, const TilePlace<kPanels>& place, const char* packed, float* tile) {
    constexpr int kColumns = kPanels * kVectors;
    constexpr std::int64_t kUnitBytes = kStepBytes * windlass::lines_of(kCodes);
    FetchPanels<kPanels> fetch(job, windlass::lines_of(kCodes));
    std::memset(tile, 0, 4 * kRows * kPanels * kPanel);
    const std::int64_t units = job.units();
    const auto* x = reinterpret_cast<const float*>(packed);
    F table = {};
    if constexpr (kTable) table = make_table<kCodes>(job.zero);
    for (std::int64_t begin = 0, span = 0; begin < units; begin += job.span_units, ++span) {
        const std::int64_t end = begin + job.span_units < units ? begin + job.span_units : units;
        F sums[kRows][kColumns] = {}, offsets[kColumns], shifts[kColumns];
        load_offsets<kPanels>(job, place, span, magic_of<kCodes>(), offsets);
        if constexpr (kShifted) load_shifts<kPanels>(place, span, shifts);
        fetch.span(place, span);
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t from = unit * kUnitBytes;
            fetch.begin(unit);
            fetch.template unit<windlass::lines_of(kCodes)>(place.lines, from);
            // A table needs no mask, so that a shift by a variable costs as much as one by a constant.
            constexpr int kPeriod = period_of<kCodes>(), kUnrolled = kTable && kPeriod > 2 ? 2 : kPeriod;
#pragma GCC unroll 1
            for (int first = 0; first < kUnitSteps; first += kUnrolled) {
#pragma GCC unroll 8
                for (int step = 0; step < kUnrolled; ++step) {
                    U bytes[kColumns];
#pragma GCC unroll 16
                    for (int column = 0; column < kColumns; ++column) {
                        const char* at = place.lines[column / kVectors] + from + column % kVectors * sizeof(U) +
                                         first / kPeriod * kStepBytes;
                        if constexpr (kTable) {
                            bytes[column] = load<U>(at) >> (windlass::lines_of(kCodes) * (first % kPeriod + step));
                        } else {
                            bytes[column] = step_bytes<kCodes>(at, step);
                        }
                    }
#pragma GCC unroll 4
                    for (int part = 0; part < 4; ++part) {
                        F weights[kColumns];
#pragma GCC unroll 16
                        for (int column = 0; column < kColumns; ++column) {
                            if constexpr (kTable) {
                                weights[column] = look_up(table, bytes[column] >> (8 * part));
                            } else {
                                weights[column] = code_float<kCodes>(bytes[column], part, offsets[column]);
                            }
                            if constexpr (kShifted) weights[column] -= shifts[column];
                        }
#pragma GCC unroll 16
                        for (int row = 0; row < kRows; ++row) {
                            const F spread = all(x[row]);
#pragma GCC unroll 16
                            for (int column = 0; column < kColumns; ++column) {
                                sums[row][column] = multiply_add(spread, weights[column], sums[row][column]);
                            }
                        }
                        x += kRows;
                    }
                }
            }
        }
        add_span<kRows, kPanels>(place, span, sums, tile);
    }
}

template <Codes kCodes, int kRows, int kPanels>
void multiply_float_block(const LowBitJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                          std::int64_t end) {
    alignas(64) float tile[kRows * kPanels * kPanel];
    const char* input = packed + block.offset;
    std::int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels) {
        const TilePlace<kPanels> place(job, panel);
        const auto multiply = [&](auto shifted) {
            if constexpr (has_table<kCodes>()) {
                if (job.zeros == nullptr) {
                    return multiply_float_tile<kCodes, kRows, kPanels, true, shifted>(job, place, input, tile);
                }
            }
            multiply_float_tile<kCodes, kRows, kPanels, false, shifted>(job, place, input, tile);
        };
        job.shifts == nullptr ? multiply(std::false_type{}) : multiply(std::true_type{});
        finish_rows_of<kPanels>(job, block, tile, panel * kPanel);
    }
    if constexpr (kPanels > 1) {
        if (panel < end) multiply_float_block<kCodes, kRows, (kPanels > 4 ? 2 : 1)>(job, block, packed, panel, end);
    }
}

// Multiplies by codes of at most two bits, or by others; no other codes are compiled.
template <bool kAtMostTwoBits>
void multiply_float_rows(const LowBitJob& job, const RowBlock* blocks, const char* packed, std::int64_t begin,
                         std::int64_t end) {
    with_codes(job.codes, [&](auto codes) {
        if constexpr ((codes <= Codes::two) == kAtMostTwoBits) {
            with_rows(blocks->padded, [&](auto rows) {
                if constexpr (rows <= kNarrowFloatRows) {
                    multiply_float_block<codes, rows, panels_for(rows, 2)>(job, *blocks, packed, begin, end);
                }
            });
        }
    });
}

}  // namespace
