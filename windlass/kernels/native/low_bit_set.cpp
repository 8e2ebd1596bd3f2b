// Products of packed codes for the instruction set that this file is compiled for, once for each; WINDLASS_SET names it.
#include "low_bit_slices.hpp"

namespace {

constexpr int kSlicedPanels = panels_for(kMostRows, 2);

std::int64_t low_bit_tile_bytes(const LowBitJob& job, std::int64_t blocks, std::int64_t panels) {
    return is_narrow(job) || is_pair(job) ? 0 : 4 * blocks * kLowTile<kSlicedPanels> * ((panels + kSlicedPanels - 1) / kSlicedPanels);
}

void multiply_floats(const LowBitJob& job, const RowBlock* blocks, std::int64_t first, std::int64_t last,
                     const char* packed, std::int64_t begin, std::int64_t end, char* tiles) {
#if defined(WINDLASS_WIDE_LOWBIT)
    windlass::WINDLASS_WIDE_LOWBIT.multiply(job, blocks, first, last, packed, begin, end, tiles);
#else
    multiply_low_slices<true, kSlicedPanels>(job, blocks + first, last - first, packed, begin, end,
                                             reinterpret_cast<float*>(tiles));
#endif
}

const windlass::FewRows& few_rows(const LowBitJob& job) {
    if constexpr (kHasFloats) {
        if (!job.codes_inputs) {
            return job.codes <= Codes::two ? windlass::WINDLASS_FEW_BITS : windlass::WINDLASS_MORE_BITS;
        }
    }
    return windlass::WINDLASS_BYTE_ROWS;
}

void low_bit_multiply(const LowBitJob& job, const RowBlock* blocks, std::int64_t first, std::int64_t last,
                      const char* packed, std::int64_t begin, std::int64_t end, char* tiles) {
    if (!kHasFloats && !job.codes_inputs) {
        return multiply_floats(job, blocks, first, last, packed, begin, end, tiles);
    }
    if (is_narrow(job) || is_pair(job)) {
        return few_rows(job).multiply(job, blocks + first, packed, begin, end);
    }
    if (job.codes_inputs) {
        multiply_low_slices<false, kSlicedPanels>(job, blocks + first, last - first, packed, begin, end,
                                                  reinterpret_cast<float*>(tiles));
    } else {
        multiply_floats(job, blocks, first, last, packed, begin, end, tiles);
    }
}

std::int64_t low_bit_divide(const LowBitJob& job, RowBlock* blocks, std::int64_t* bytes) {
    const std::int64_t row_bytes = row_bytes_of(job);
    if (is_narrow(job)) {
        const std::int64_t padded = job.rows > 4 && job.rows <= 8 ? 8 : padded_rows(job.rows);
        blocks[0] = {0, job.rows, padded, 0};
        *bytes = (padded * row_bytes + 63) / 64 * 64;
        return 1;
    }
    if (is_pair(job)) {
        const std::int64_t half = (kPairBlock * row_bytes + 63) / 64 * 64;
        blocks[0] = {0, kPairBlock, kPairBlock, 0};
        blocks[1] = {kPairBlock, job.rows - kPairBlock, kPairBlock, half};
        *bytes = 2 * half;
        return 2;
    }
    const std::int64_t number = (job.rows + kMostRows - 1) / kMostRows;
    std::int64_t first = 0, offset = 0, used = 0;
    for (; first < job.rows; ++used) {
        const std::int64_t left = number - used;
        std::int64_t count = (job.rows - first + left - 1) / left;
        const std::int64_t padded = padded_rows(count);
        if (count < padded && first + count < job.rows) count = padded < job.rows - first ? padded : job.rows - first;
        blocks[used] = {first, count, padded, offset};
        first += count;
        offset += (padded * row_bytes + 63) / 64 * 64;
    }
    *bytes = offset;
    return used;
}

// Splits int8 inputs for two passes, x = low + 16 * high with both between -8 and 8, into words as `step_words` counts.
inline void split_inputs(const std::int8_t* codes, std::int64_t steps, std::int64_t rows, std::uint32_t* words) {
    std::int8_t low[windlass::kCodeGroup], high[windlass::kCodeGroup];
    for (std::int64_t i = 0; i < 4 * steps; ++i) {
        high[i] = static_cast<std::int8_t>((codes[i] + 8) >> 4);
        low[i] = static_cast<std::int8_t>(codes[i] - 16 * high[i]);
    }
    for (std::int64_t i = 0; i < 4 * steps; i += 4, words += 2 * rows) {
        words[0] = load<std::uint32_t>(low + i);
        words[rows] = load<std::uint32_t>(high + i);
    }
}

void pack_byte_rows(const LowBitJob& job, const RowBlock& block, char* to) {
    const std::int64_t rows = block.padded, units = job.units();
    for (std::int64_t row = 0; row < rows; ++row) {
        char* at = to;
        for (std::int64_t group = 0; group < units; group += kGroupUnits) {
            constexpr std::int64_t kGroup = windlass::kCodeGroup;
            alignas(64) float values[kGroup];
            alignas(64) std::int8_t codes[kGroup] = {};
            float scale = 0;
            if (row < block.count) {
                const std::int64_t first = group * kUnit, left = job.features - first;
                load_group(job, block.first + row, first, left < kGroup ? left : kGroup, values);
                scale = code_group(values, codes);
            }
            reinterpret_cast<float*>(at)[row] = scale;
            at += 4 * rows;
            const std::int64_t last = group + kGroupUnits < units ? group + kGroupUnits : units;
            for (std::int64_t span = group; span < last; span += job.span_units) {
                const std::int64_t end = span + job.span_units < last ? span + job.span_units : last;
                const std::int8_t *from = codes + (span - group) * kUnit, *stop = codes + (end - group) * kUnit;
                std::int32_t sum = 0;
                for (const std::int8_t* code = from; code < stop; ++code) sum += *code;
                reinterpret_cast<std::int32_t*>(at)[row] = job.zeros == nullptr ? -job.zero * sum : sum;
                at += 4 * rows;
                auto* word = reinterpret_cast<std::uint32_t*>(at) + row;
                const std::int64_t steps = (end - span) * kUnitSteps;
                if (is_widened(job)) {
                    write_words(from, steps, rows, word);
                } else if (step_words(job) == 2) {
                    split_inputs(from, steps, rows, word);
                } else {
                    for (; from < stop; from += 4, word += rows) *word = load<std::uint32_t>(from);
                }
                at += 4 * rows * steps * step_words(job);
            }
        }
    }
}

void low_bit_pack_rows(const LowBitJob& job, const RowBlock& block, char* packed) {
    char* to = packed + block.offset;
    if (job.codes_inputs) return pack_byte_rows(job, block, to);
    const std::int64_t features = job.features, padded = job.units() * kUnit;
    if (job.is_bf16) {
        transpose_rows(reinterpret_cast<float*>(to), static_cast<const std::uint16_t*>(job.x), features, features,
                       padded, block, [](std::uint16_t bits) { return float_of(bits); });
    } else {
        transpose_rows(reinterpret_cast<float*>(to), static_cast<const float*>(job.x), features, features, padded,
                       block, [](float value) { return value; });
    }
}

std::int64_t low_bit_panel_group(const LowBitJob& job) {
    if (is_pair(job)) return kPairPanels;
    return is_narrow(job) ? panels_for(static_cast<int>(padded_rows(job.rows)), 2) : kSlicedPanels;
}

}  // namespace

namespace windlass {
const LowBitSet WINDLASS_SET = {low_bit_divide, low_bit_pack_rows, low_bit_multiply, low_bit_panel_group,
                                low_bit_tile_bytes};
}
