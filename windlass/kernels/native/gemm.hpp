// Product of a few or many rows with a packed weight, for the instruction set that the file is compiled for.
//
// Every output is one accumulator lane, to which the input features are added one after the other. So the bits of a row
// do not depend on the other rows, on the size of the micro-kernel, or on the division of outputs among threads.
#pragma once

#include <cstring>
#include <type_traits>

#include "inference_job.hpp"
#include "micro_kernel.hpp"

namespace {

using windlass::GemmJob;
using windlass::kPanel;
using windlass::kStepBytes;
using windlass::PanelCode;
using windlass::RowBlock;

// Steps by which the weight is requested ahead of its use, into the second-level cache: the first has too few misses in
// flight for a latency of memory. Many rows compute long enough on a step to request it once more, into the first.
constexpr std::int64_t ahead_for(int rows) { return rows <= 4 ? 32 : 64; }
constexpr std::int64_t kNear = 6;

// How a step of a panel is multiplied. `Input` is the element of the packed input, of which a step has kInputs a row.
struct PlainStep {  // float32 weights
    using Input = float;
    using Sum = F;
    static constexpr int kInputs = 1;
    static WINDLASS_INLINE F spread(Input x) { return all(x); }
    static WINDLASS_INLINE F weight(U bits, int) { return (F)bits; }
    static WINDLASS_INLINE F add(F sum, F x, F weight) { return multiply_add(x, weight, sum); }
};

struct WideBf16Step {  // bf16 weights, widened
    using Input = float;
    using Sum = F;
    static constexpr int kInputs = 2;
    static WINDLASS_INLINE F spread(Input x) { return all(x); }
    static WINDLASS_INLINE F weight(U bits, int part) { return part == 0 ? (F)(bits << 16) : (F)(bits & 0xffff0000u); }
    static WINDLASS_INLINE F add(F sum, F x, F weight) { return multiply_add(x, weight, sum); }
};

struct WideInt8Step {  // int8 weights, widened
    using Input = float;
    using Sum = F;
    static constexpr int kInputs = 4;
    static WINDLASS_INLINE F spread(Input x) { return all(x); }
    // 2^23 + byte is a float whose lowest bits are the byte: two operations in place of a conversion.
    static WINDLASS_INLINE F weight(U bits, int part) {
        return (F)(((bits >> (8 * part)) & 0xffu) | 0x4b000000u) - all(8388608.0f + 128.0f);
    }
    static WINDLASS_INLINE F add(F sum, F x, F weight) { return multiply_add(x, weight, sum); }
};

#if defined(__AVX512BF16__)
struct DotBf16Step {  // bf16 weights and inputs; each instruction adds two products
    using Input = std::uint32_t;
    using Sum = F;
    static constexpr int kInputs = 1;
    static WINDLASS_INLINE U spread(Input x) { return all_bits(x); }
    static WINDLASS_INLINE U weight(U bits, int) { return bits; }
    static WINDLASS_INLINE F add(F sum, U x, U weight) {
        return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)x);
    }
};
#endif

// Integer products of bytes with an offset of 128 and signed bytes. Sums are exact, so their order does not matter.
#if defined(__AVX512VNNI__)
struct CodedStep {
    using Input = std::uint32_t;  // 4 signed bytes
    using Sum = I;
    static constexpr int kInputs = 1;
    static WINDLASS_INLINE U spread(Input x) { return all_bits(x); }
    static WINDLASS_INLINE U weight(U bits, int) { return bits; }
    static WINDLASS_INLINE I add(I sum, U x, U weight) {
        return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x);
    }
};
#else
struct CodedStep {
    using Input = std::uint32_t;  // 2 signed halves: bytes 0 and 2, then 1 and 3
    using Sum = I;
    static constexpr int kInputs = 2;
    static WINDLASS_INLINE U spread(Input x) { return all_bits(x); }
    static WINDLASS_INLINE U weight(U bits, int part) { return (bits >> (8 * part)) & 0x00ff00ffu; }
    static WINDLASS_INLINE I add(I sum, U x, U weight) {
#if defined(__AVX512BW__)
        return sum + (I)_mm512_madd_epi16((__m512i)weight, (__m512i)x);
#elif defined(__AVX2__)
        return sum + (I)_mm256_madd_epi16((__m256i)weight, (__m256i)x);
#else
        return sum + (I)(weight & 0xffffu) * ((I)(x << 16) >> 16) + (I)(weight >> 16) * ((I)x >> 16);
#endif
    }
};
#endif

// Adds steps [begin, end) of kPanels panels to the sums of kRows rows. `x` is the input of step `begin`.
template <class Step, int kRows, int kPanels>
WINDLASS_INLINE void add_steps(const char* const* at, std::int64_t panel_bytes, std::int64_t steps, std::int64_t begin,
                               std::int64_t end, const typename Step::Input* x,
                               typename Step::Sum (&sums)[kRows][kPanels * kVectors]) {
    constexpr int kColumns = kPanels * kVectors;
    // Requests run ahead in each panel, and at its end in the panels that the next call takes: kPanels further.
    constexpr std::int64_t kAhead = ahead_for(kRows);
    const std::int64_t turn = steps > kAhead ? steps - kAhead : 0;
    for (std::int64_t step = begin; step < end; ++step) {
        const std::int64_t ahead = kAhead * kStepBytes + (step < turn ? 0 : (kPanels - 1) * panel_bytes);
        U bits[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            const char* from = at[column / kVectors] + step * kStepBytes;
            if (column % kVectors == 0) {
                __builtin_prefetch(from + ahead, 0, 2);
                if constexpr (kRows > 4) __builtin_prefetch(from + kNear * kStepBytes);
            }
            bits[column] = load<U>(from + (column % kVectors) * sizeof(U));
        }
#pragma GCC unroll 16
        for (int part = 0; part < Step::kInputs; ++part) {
            decltype(Step::weight(U{}, 0)) weights[kColumns];
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) weights[column] = Step::weight(bits[column], part);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                const auto spread = Step::spread(x[part * kRows + row]);
#pragma GCC unroll 16
                for (int column = 0; column < kColumns; ++column) {
                    sums[row][column] = Step::add(sums[row][column], spread, weights[column]);
                }
            }
        }
        x += Step::kInputs * kRows;
    }
}

// tile[row][output] of kRows rows and kPanels panels, over all steps.
template <class Step, int kRows, int kPanels>
void multiply_tile(const char* panels, std::int64_t panel_bytes, const char* packed, std::int64_t steps, float* tile) {
    constexpr int kColumns = kPanels * kVectors;
    const char* at[kPanels];
    F sums[kRows][kColumns];
#pragma GCC unroll 16
    for (int panel = 0; panel < kPanels; ++panel) at[panel] = panels + panel * panel_bytes;
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) sums[row][column] = F{};
    }
    add_steps<Step, kRows, kPanels>(at, panel_bytes, steps, 0, steps,
                                    reinterpret_cast<const typename Step::Input*>(packed), sums);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            store(tile + (row * kColumns + column) * kLanes, sums[row][column]);
        }
    }
}

// Bytes of one group of packed int8 inputs of a block: scales, first sums, words.
template <class Step>
constexpr std::int64_t group_bytes(std::int64_t rows) {
    return rows * 4 * (2 + windlass::kCodeGroup / 4 * Step::kInputs);
}

// The same for int8 inputs: integer sums of each group, times the group's scale, added in the order of the groups.
template <class Step, int kRows, int kPanels>
void multiply_coded_tile(const char* panels, std::int64_t panel_bytes, const char* packed, std::int64_t steps,
                         float* tile) {
    constexpr int kColumns = kPanels * kVectors;
    constexpr std::int64_t kSteps = windlass::kCodeGroup / 4;
    const char* at[kPanels];
#pragma GCC unroll 16
    for (int panel = 0; panel < kPanels; ++panel) at[panel] = panels + panel * panel_bytes;
    std::memset(tile, 0, 4 * kRows * kPanels * kPanel);
    for (std::int64_t begin = 0; begin < steps; begin += kSteps) {
        const auto* scales = reinterpret_cast<const float*>(packed);
        const auto* firsts = reinterpret_cast<const std::int32_t*>(packed) + kRows;
        I sums[kRows][kColumns];
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) sums[row][column] = I{} + firsts[row];
        }
        add_steps<Step, kRows, kPanels>(at, panel_bytes, steps, begin, begin + kSteps < steps ? begin + kSteps : steps,
                                        reinterpret_cast<const typename Step::Input*>(packed) + 2 * kRows, sums);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            const F scale = all(scales[row]);
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                float* total = tile + (row * kColumns + column) * kLanes;
                store(total, multiply_add(__builtin_convertvector(sums[row][column], F), scale, load<F>(total)));
            }
        }
        packed += group_bytes<Step>(kRows);
    }
}

// Scales a row of a tile, adds the bias and stores it, without the padding of the last panel.
[[gnu::noinline]] void finish_row(const GemmJob& job, const float* tile, std::int64_t row, std::int64_t first,
                       std::int64_t count) {
    float sums[8 * kPanel];
    for (std::int64_t i = 0; i < count; ++i) sums[i] = tile[i];
    if (job.scales != nullptr) {
        for (std::int64_t i = 0; i < count; ++i) sums[i] *= job.scales[first + i];
    }
    if (job.bias != nullptr) {
        for (std::int64_t i = 0; i < count; ++i) sums[i] += job.bias[first + i];
    }
    if (job.is_bf16) {
        auto* to = static_cast<std::uint16_t*>(job.y) + row * job.outputs + first;
        for (std::int64_t i = 0; i < count; ++i) to[i] = bf16_of(sums[i]);
    } else {
        std::memcpy(static_cast<float*>(job.y) + row * job.outputs + first, sums, 4 * count);
    }
}

template <class Step, int kRows, int kPanels>
void multiply_block(const GemmJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                    std::int64_t end) {
    alignas(64) float tile[kRows * kPanels * kPanel];
    const std::int64_t panel_bytes = job.steps() * kStepBytes;
    std::int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels) {
        const char *panels = job.panels + panel * panel_bytes, *input = packed + block.offset;
        if constexpr (std::is_same_v<Step, CodedStep>) {
            multiply_coded_tile<Step, kRows, kPanels>(panels, panel_bytes, input, job.steps(), tile);
        } else {
            multiply_tile<Step, kRows, kPanels>(panels, panel_bytes, input, job.steps(), tile);
        }
        const std::int64_t first = panel * kPanel, left = job.outputs - first;
        for (std::int64_t row = 0; row < block.count; ++row) {
            finish_row(job, tile + row * kPanels * kPanel, block.first + row, first,
                       left < kPanels * kPanel ? left : kPanels * kPanel);
        }
    }
    if constexpr (kPanels > 1) {
        if (panel < end) multiply_block<Step, kRows, kPanels / 2>(job, block, packed, panel, end);
    }
}

template <class Step, int kRows>
WINDLASS_INLINE bool multiply_if(const GemmJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                                 std::int64_t end) {
    if constexpr (kRows <= kMostRows) {
        if (block.padded != kRows) return false;
        multiply_block<Step, kRows, panels_for(kRows, Step::kInputs)>(job, block, packed, begin, end);
        return true;
    }
    return false;
}

template <class Step>
void multiply_rows(const GemmJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                   std::int64_t end) {
    (void)(multiply_if<Step, 1>(job, block, packed, begin, end) || multiply_if<Step, 2>(job, block, packed, begin, end) ||
           multiply_if<Step, 4>(job, block, packed, begin, end) || multiply_if<Step, 6>(job, block, packed, begin, end) ||
           multiply_if<Step, 8>(job, block, packed, begin, end) || multiply_if<Step, 12>(job, block, packed, begin, end));
}

// True if rows are packed as pairs of bf16 for the dot-product instruction.
inline bool uses_dot(const GemmJob& job) {
#if defined(__AVX512BF16__)
    return job.code == PanelCode::bf16 && job.is_bf16;
#else
    (void)job;
    return false;
#endif
}

std::int64_t divide_rows(const GemmJob& job, RowBlock* blocks, std::int64_t* bytes) {
    const std::int64_t groups = (job.features + windlass::kCodeGroup - 1) / windlass::kCodeGroup;
    const std::int64_t row_bytes =
        job.codes_inputs ? groups * group_bytes<CodedStep>(1)
                         : job.steps() * windlass::features_per_step(job.code) * (uses_dot(job) ? 2 : 4);
    const std::int64_t number = (job.rows + kMostRows - 1) / kMostRows;
    std::int64_t first = 0, offset = 0;
    for (std::int64_t i = 0; i < number; ++i) {
        std::int64_t count = (job.rows - first + number - i - 1) / (number - i);
        const std::int64_t padded = padded_rows(count);
        if (count < padded && first + count < job.rows) count = padded < job.rows - first ? padded : job.rows - first;
        if (count == 0) {
            *bytes = offset;
            return i;
        }
        blocks[i] = {first, count, padded, offset};
        first += count;
        offset += (padded * row_bytes + 63) / 64 * 64;
    }
    *bytes = offset;
    return number;
}

// Transposes the rows of a block: all rows of the first feature, all rows of the second, ... Padding is 0.
template <class To, class From, class Convert>
WINDLASS_INLINE void transpose_rows(To* to, const From* from, std::int64_t stride, std::int64_t features,
                                    std::int64_t padded_features, const RowBlock& block, Convert convert) {
    const std::int64_t width = block.padded;
    for (std::int64_t row = 0; row < block.count; ++row) {
        const From* line = from + (block.first + row) * stride;
        for (std::int64_t i = 0; i < features; ++i) to[i * width + row] = convert(line[i]);
    }
    for (std::int64_t row = 0; row < width; ++row) {
        const std::int64_t from_feature = row < block.count ? features : 0;
        for (std::int64_t i = from_feature; i < padded_features; ++i) to[i * width + row] = To{};
    }
}

// Features [first, first + count) of an input row as floats, with zeros up to kCodeGroup.
inline void load_group(const GemmJob& job, std::int64_t row, std::int64_t first, std::int64_t count, float* to) {
    if (job.is_bf16) {
        const auto* line = static_cast<const std::uint16_t*>(job.x) + row * job.features + first;
        for (std::int64_t i = 0; i < count; ++i) to[i] = float_of(line[i]);
    } else {
        std::memcpy(to, static_cast<const float*>(job.x) + row * job.features + first, 4 * count);
    }
    for (std::int64_t i = count; i < windlass::kCodeGroup; ++i) to[i] = 0;
}

// Rounds a group to signed bytes, to nearest and ties to even. Returns its scale; a group with an infinity or a NaN has
// a scale that is not finite.
inline float code_group(const float* values, std::int8_t* codes) {
    constexpr std::int64_t kGroup = windlass::kCodeGroup;
    F most = F{}, lost = F{};
    for (std::int64_t i = 0; i < kGroup; i += kLanes) {
        const F value = load<F>(values + i), size = (F)((U)value & 0x7fffffffu);
        most = select((I)(size > most), size, most);
        lost = lost + (value - value);  // NaN from infinities and NaNs
    }
    float largest = most[0], sum = lost[0];
    for (int lane = 1; lane < kLanes; ++lane) {
        largest = most[lane] > largest ? most[lane] : largest;
        sum += lost[lane];
    }
    if (sum != sum) {
        std::memset(codes, 1, kGroup);
        return sum;
    }
    const F factor = all(largest > 0x1p-120f ? 127.0f / largest : 0.0f);
    typedef std::int8_t Signed __attribute__((vector_size(kLanes)));
    for (std::int64_t i = 0; i < kGroup; i += kLanes) {
        const F rounded = (load<F>(values + i) * factor + all(12582912.0f)) - all(12582912.0f);  // 1.5 * 2^23
        store(codes + i, __builtin_convertvector(__builtin_convertvector(rounded, I), Signed));
    }
    return largest / 127.0f;
}

void pack_coded_rows(const GemmJob& job, const RowBlock& block, char* to) {
    constexpr std::int64_t kGroup = windlass::kCodeGroup;
    const std::int64_t rows = block.padded, bytes = group_bytes<CodedStep>(rows);
    for (std::int64_t row = 0; row < rows; ++row) {
        char* group = to;
        for (std::int64_t first = 0; first < job.features; first += kGroup, group += bytes) {
            alignas(64) float values[kGroup];
            alignas(64) std::int8_t codes[kGroup] = {};
            float scale = 0;
            if (row < block.count) {
                load_group(job, block.first + row, first,
                           job.features - first < kGroup ? job.features - first : kGroup, values);
                scale = code_group(values, codes);
            }
            std::int32_t sum = 0;
            for (std::int64_t i = 0; i < kGroup; ++i) sum += codes[i];
            auto* words = reinterpret_cast<std::uint32_t*>(group);
            reinterpret_cast<float*>(group)[row] = scale;
            words[rows + row] = static_cast<std::uint32_t>(-128 * sum);
            words += 2 * rows + row;
            for (std::int64_t i = 0; i < kGroup; i += 4) {
                if constexpr (CodedStep::kInputs == 1) {
                    *words = load<std::uint32_t>(codes + i);
                    words += rows;
                } else {
                    const auto pair = [](std::int8_t low, std::int8_t high) {
                        return static_cast<std::uint32_t>(static_cast<std::uint16_t>(low)) |
                               static_cast<std::uint32_t>(static_cast<std::uint16_t>(high)) << 16;
                    };
                    words[0] = pair(codes[i], codes[i + 2]);
                    words[rows] = pair(codes[i + 1], codes[i + 3]);
                    words += 2 * rows;
                }
            }
        }
    }
}

void pack_rows(const GemmJob& job, const RowBlock& block, char* packed) {
    char* to = packed + block.offset;
    if (job.codes_inputs) return pack_coded_rows(job, block, to);
    const std::int64_t features = job.features, padded = job.steps() * windlass::features_per_step(job.code);
    if (uses_dot(job)) {
        const auto* x = static_cast<const std::uint16_t*>(job.x);
        auto* pairs = reinterpret_cast<std::uint32_t*>(to);
        for (std::int64_t row = 0; row < block.padded; ++row) {
            const std::uint16_t* line = x + (block.first + row) * features;
            for (std::int64_t i = 0; i < padded; i += 2) {
                const std::uint32_t low = row < block.count ? line[i] : 0;
                const std::uint32_t high = row < block.count && i + 1 < features ? line[i + 1] : 0;
                pairs[i / 2 * block.padded + row] = low | high << 16;
            }
        }
    } else if (job.is_bf16) {
        transpose_rows(reinterpret_cast<float*>(to), static_cast<const std::uint16_t*>(job.x), features, features,
                       padded, block, [](std::uint16_t bits) { return float_of(bits); });
    } else if (block.padded == 1) {
        std::memcpy(to, static_cast<const float*>(job.x) + block.first * features, 4 * features);
        std::memset(to + 4 * features, 0, 4 * (padded - features));
    } else {
        transpose_rows(reinterpret_cast<float*>(to), static_cast<const float*>(job.x), features, features, padded,
                       block, [](float value) { return value; });
    }
}

void multiply(const GemmJob& job, const RowBlock* blocks, std::int64_t first, std::int64_t last, const char* packed,
              std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = first; i < last; ++i) {
        const RowBlock& block = blocks[i];
        switch (job.code) {
            case PanelCode::fp32:
                multiply_rows<PlainStep>(job, block, packed, begin, end);
                break;
            case PanelCode::bf16:
#if defined(__AVX512BF16__)
                if (uses_dot(job)) {
                    multiply_rows<DotBf16Step>(job, block, packed, begin, end);
                    break;
                }
#endif
                multiply_rows<WideBf16Step>(job, block, packed, begin, end);
                break;
            case PanelCode::int8:
                if (job.codes_inputs) {
                    multiply_rows<CodedStep>(job, block, packed, begin, end);
                    break;
                }
                multiply_rows<WideInt8Step>(job, block, packed, begin, end);
                break;
        }
    }
}

// Reads 64 bytes at a time, as the products do, and combines all words.
std::uint64_t read_words(const char* from, std::int64_t bytes) {
    U words[8] = {};
    constexpr std::int64_t kStride = 8 * sizeof(U);
    for (std::int64_t at = 0; at + kStride <= bytes; at += kStride) {
        for (std::int64_t line = 0; line < kStride; line += 64) __builtin_prefetch(from + at + line + 2048);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) words[i] ^= load<U>(from + at + i * sizeof(U));
    }
    std::uint64_t sum = 0;
    for (const U& word : words) {
        for (int lane = 0; lane < kLanes; ++lane) sum += word[lane];
    }
    return sum;
}

std::int64_t panel_group(const GemmJob& job) {
    const int rows = static_cast<int>(padded_rows(job.rows < kMostRows ? job.rows : kMostRows));
    if (job.codes_inputs) return panels_for(rows, CodedStep::kInputs);
    return panels_for(rows, job.code == PanelCode::fp32 || uses_dot(job) ? 1 : 2);
}

}  // namespace
