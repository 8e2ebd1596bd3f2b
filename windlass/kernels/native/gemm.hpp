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
using windlass::kSlicedBlocks;
using windlass::kStepBytes;
using windlass::PanelCode;
using windlass::RowBlock;

// Steps between the prefetch of a weight into the second-level cache and its use. The first-level cache allows too few
// misses in flight to hide the latency of memory. With many rows a step takes long enough to prefetch it once more,
// into the first-level cache.
constexpr std::int64_t ahead_for(int rows) { return rows <= 4 ? 32 : 64; }
constexpr std::int64_t kNear = 6;

// Multiplication of a step of a panel. `Input` is an element of the packed input; a step has kInputs of them for each
// row.
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

// Adds to each lane four products of unsigned bytes `w` and signed bytes `x`, in one instruction.
#if defined(__AVX512VNNI__)
#define WINDLASS_BYTE_DOTS
WINDLASS_INLINE I add_byte_products(I sum, U w, U x) {
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#elif defined(__AVXVNNI__)
#define WINDLASS_BYTE_DOTS
WINDLASS_INLINE I add_byte_products(I sum, U w, U x) {
    return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#endif

// Integer products of bytes with an offset of 128 and signed bytes. Sums are exact, so their order does not matter.
#if defined(WINDLASS_BYTE_DOTS)
struct CodedStep {
    using Input = std::uint32_t;  // 4 signed bytes
    using Sum = I;
    static constexpr int kInputs = 1;
    static WINDLASS_INLINE U spread(Input x) { return all_bits(x); }
    static WINDLASS_INLINE U weight(U bits, int) { return bits; }
    static WINDLASS_INLINE I add(I sum, U x, U weight) { return add_byte_products(sum, weight, x); }
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
        return computed_here(sum + (I)_mm512_madd_epi16((__m512i)weight, (__m512i)x));
#elif defined(__AVX2__)
        return computed_here(sum + (I)_mm256_madd_epi16((__m256i)weight, (__m256i)x));
#else
        return sum + (I)(weight & 0xffffu) * ((I)(x << 16) >> 16) + (I)(weight >> 16) * ((I)x >> 16);
#endif
    }
};
#endif

// The same products, of weights that were widened to halves before: a step is a part of a CodedStep.
struct HalvesStep {
    using Input = std::uint32_t;
    using Sum = I;
    static constexpr int kInputs = 1;
    static WINDLASS_INLINE U spread(Input x) { return all_bits(x); }
    static WINDLASS_INLINE U weight(U bits, int) { return bits; }
    static WINDLASS_INLINE I add(I sum, U x, U weight) { return CodedStep::add(sum, x, weight); }
};

// Inputs are rounded to int8: sums are integers, and each group of features has a scale.
template <class Step>
constexpr bool is_coded = std::is_same_v<Step, CodedStep> || std::is_same_v<Step, HalvesStep>;

// Widening takes a ninth of the operations of a block of 6 rows. For several blocks, a slice is widened once.
template <class Step>
constexpr bool is_widened_once = std::is_same_v<Step, CodedStep> && CodedStep::kInputs == 2 && kLanes > 4;

constexpr int kUnroll = 4;  // steps for which a loop computes addresses once: computing them competes with products

// Prefetches weights ahead in each panel and, near the end of the panels, in the panels of the next call, kPanels
// further on. For one row, the loop that widens weights is too long for the processor to begin loads of many lines: it
// prefetches into the first-level cache, so that no line waits twice.
template <class Step, int kRows, int kPanels>
struct FetchAhead {
    static constexpr bool kIntoFirst = kRows == 1 && Step::kInputs > 1;
    static constexpr std::int64_t kAhead = kIntoFirst ? 16 : ahead_for(kRows);
    std::int64_t panel_bytes, turn;
    std::int64_t ahead = 0;

    FetchAhead(std::int64_t panel_bytes, std::int64_t steps)
        : panel_bytes(panel_bytes), turn(steps > kAhead ? steps - kAhead : 0) {}

    WINDLASS_INLINE void begin(std::int64_t step) {
        ahead = kAhead * kStepBytes + (step < turn ? 0 : (kPanels - 1) * panel_bytes);
    }

    WINDLASS_INLINE void line(const char* panel, std::int64_t offset, int step) const {
        __builtin_prefetch(panel + (offset + ahead) + step * kStepBytes, 0, kIntoFirst ? 3 : 2);
        if constexpr (kRows > 4) __builtin_prefetch(panel + offset + (step + kNear) * kStepBytes);
    }
};

// Adds one step of kPanels panels to the sums of kRows rows: step `step` from `offset` bytes in each panel and from `x`.
template <class Step, int kRows, int kPanels, class Fetch>
WINDLASS_INLINE void add_step(const char* const (&at)[kPanels], std::int64_t offset, int step,
                              const typename Step::Input* x, const Fetch& fetch,
                              typename Step::Sum (&sums)[kRows][kPanels * kVectors]) {
    constexpr int kColumns = kPanels * kVectors;
    U bits[kColumns];
#pragma GCC unroll 16
    for (int column = 0; column < kColumns; ++column) {
        if (column % kVectors == 0) fetch.line(at[column / kVectors], offset, step);
        bits[column] = load<U>(at[column / kVectors] + offset + step * kStepBytes + (column % kVectors) * sizeof(U));
    }
    x += step * Step::kInputs * kRows;
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
}

// Adds steps [begin, end) of kPanels panels to the sums of kRows rows. `x` is the input of step `begin`.
template <class Step, int kRows, int kPanels, class Fetch>
WINDLASS_INLINE void add_steps(const char* panels, std::int64_t panel_bytes, std::int64_t begin, std::int64_t end,
                               const typename Step::Input* x, Fetch& fetch,
                               typename Step::Sum (&sums)[kRows][kPanels * kVectors]) {
    const char* at[kPanels];
#pragma GCC unroll 16
    for (int panel = 0; panel < kPanels; ++panel) at[panel] = panels + panel * panel_bytes;
    std::int64_t step = begin;
    for (; step + kUnroll <= end; step += kUnroll, x += kUnroll * Step::kInputs * kRows) {
        fetch.begin(step);
#pragma GCC unroll 16
        for (int i = 0; i < kUnroll; ++i) {
            add_step<Step, kRows, kPanels>(at, step * kStepBytes, i, x, fetch, sums);
        }
    }
    for (; step < end; ++step, x += Step::kInputs * kRows) {
        add_step<Step, kRows, kPanels>(at, step * kStepBytes, 0, x, fetch, sums);
    }
}

constexpr std::int64_t kGroupSteps = windlass::kCodeGroup / 4;

// Bytes of one group of packed int8 inputs of a block: scales, first sums, words.
constexpr std::int64_t group_bytes(std::int64_t rows) { return rows * 4 * (2 + kGroupSteps * CodedStep::kInputs); }

template <class Step>
constexpr std::int64_t steps_of_group = kGroupSteps * CodedStep::kInputs / Step::kInputs;

// Adds steps [begin, end) to tile[row][output] of kRows rows and kPanels panels; step 0 sets it. `packed` is the input
// of the block. With int8 inputs a range begins at a group: integer sums of each group, times the group's scale, are
// added in the order of the groups.
template <class Step, int kRows, int kPanels, class Fetch>
WINDLASS_INLINE void add_to_tile(const char* panels, std::int64_t panel_bytes, const char* packed, std::int64_t begin,
                                 std::int64_t end, Fetch& fetch, float* tile) {
    constexpr int kColumns = kPanels * kVectors;
    typename Step::Sum sums[kRows][kColumns];
    if constexpr (is_coded<Step>) {
        constexpr std::int64_t kSteps = steps_of_group<Step>;
        if (begin == 0) std::memset(tile, 0, 4 * kRows * kPanels * kPanel);
        for (std::int64_t first = begin; first < end; first += kSteps) {
            const char* group = packed + first / kSteps * group_bytes(kRows);
            const auto* scales = reinterpret_cast<const float*>(group);
            const auto* firsts = reinterpret_cast<const std::int32_t*>(group) + kRows;
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                for (int column = 0; column < kColumns; ++column) sums[row][column] = I{} + firsts[row];
            }
            add_steps<Step, kRows, kPanels>(panels, panel_bytes, first, first + kSteps < end ? first + kSteps : end,
                                            reinterpret_cast<const typename Step::Input*>(group) + 2 * kRows, fetch,
                                            sums);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                const F scale = all(scales[row]);
#pragma GCC unroll 16
                for (int column = 0; column < kColumns; ++column) {
                    float* total = tile + (row * kColumns + column) * kLanes;
                    store(total, multiply_add(__builtin_convertvector(sums[row][column], F), scale, load<F>(total)));
                }
            }
        }
    } else {
        const auto* x = reinterpret_cast<const typename Step::Input*>(packed) + begin * Step::kInputs * kRows;
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                sums[row][column] = begin == 0 ? F{} : load<F>(tile + (row * kColumns + column) * kLanes);
            }
        }
        add_steps<Step, kRows, kPanels>(panels, panel_bytes, begin, end, x, fetch, sums);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                store(tile + (row * kColumns + column) * kLanes, sums[row][column]);
            }
        }
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

// Finishes all rows of a block. Tiles without padding are stored a vector at a time.
template <int kPanels>
void finish_rows_of(const GemmJob& job, const RowBlock& block, const float* tile, std::int64_t first) {
    constexpr std::int64_t kWidth = kPanels * kPanel;
    const std::int64_t left = job.outputs - first;
    if (left < kWidth || job.is_bf16) {
        for (std::int64_t row = 0; row < block.count; ++row) {
            finish_row(job, tile + row * kWidth, block.first + row, first, left < kWidth ? left : kWidth);
        }
        return;
    }
    for (std::int64_t row = 0; row < block.count; ++row) {
        float* to = static_cast<float*>(job.y) + (block.first + row) * job.outputs + first;
#pragma GCC unroll 16
        for (std::int64_t i = 0; i < kWidth; i += kLanes) {
            F sum = load<F>(tile + row * kWidth + i);
            if (job.scales != nullptr) sum = sum * load<F>(job.scales + first + i);
            if (job.bias != nullptr) sum = sum + load<F>(job.bias + first + i);
            store(to + i, sum);
        }
    }
}

template <class Step, int kRows, int kPanels>
void multiply_block(const GemmJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                    std::int64_t end) {
    alignas(64) float tile[kRows * kPanels * kPanel];
    const std::int64_t steps = job.steps(), panel_bytes = steps * kStepBytes;
    FetchAhead<Step, kRows, kPanels> fetch(panel_bytes, steps);
    std::int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels) {
        add_to_tile<Step, kRows, kPanels>(job.panels + panel * panel_bytes, panel_bytes, packed + block.offset, 0,
                                          steps, fetch, tile);
        finish_rows_of<kPanels>(job, block, tile, panel * kPanel);
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

// Products of a few blocks of rows take the weight in slices of this many steps, which stay in the first-level cache
// for all blocks. While a slice is multiplied, the next one is read from memory.
template <class Step>
constexpr std::int64_t kSliceSteps = (is_widened_once<Step> ? 3 : 6) * kGroupSteps;

// Prefetches steps [next, last) of the slice at `slice`, `rate` of them for every kUnroll steps that are multiplied.
// `kNearby`: the slice itself may still be on its way to the first-level cache.
template <int kPanels, bool kNearby>
struct FetchSlice {
    const char* slice;
    std::int64_t panel_bytes, next, last, rate;

    WINDLASS_INLINE void begin(std::int64_t) {
        for (const std::int64_t end = next + rate < last ? next + rate : last; next < end; ++next) {
#pragma GCC unroll 16
            for (int panel = 0; panel < kPanels; ++panel) {
                __builtin_prefetch(slice + panel * panel_bytes + next * kStepBytes, 0, 2);
            }
        }
    }

    WINDLASS_INLINE void line(const char* panel, std::int64_t offset, int step) const {
        if constexpr (kNearby) __builtin_prefetch(panel + offset + (step + kNear) * kStepBytes);
    }
};

template <class Step, int kRows, int kPanels, bool kNearby>
WINDLASS_INLINE bool add_slice_if(const RowBlock& block, const char* panels, std::int64_t panel_bytes,
                                  const char* packed, std::int64_t begin, std::int64_t end,
                                  FetchSlice<kPanels, kNearby>& fetch, float* tile) {
    if constexpr (kRows <= kMostRows) {
        if (block.padded != kRows) return false;
        add_to_tile<Step, kRows, kPanels>(panels, panel_bytes, packed + block.offset, begin, end, fetch, tile);
        return true;
    }
    return false;
}

template <class Step, int kPanels, bool kNearby>
[[gnu::noinline]] void add_slice(const RowBlock& block, const char* panels, std::int64_t panel_bytes, const char* packed,
                                 std::int64_t begin, std::int64_t end, FetchSlice<kPanels, kNearby>& fetch,
                                 float* tile) {
    (void)(add_slice_if<Step, 1>(block, panels, panel_bytes, packed, begin, end, fetch, tile) ||
           add_slice_if<Step, 2>(block, panels, panel_bytes, packed, begin, end, fetch, tile) ||
           add_slice_if<Step, 4>(block, panels, panel_bytes, packed, begin, end, fetch, tile) ||
           add_slice_if<Step, 6>(block, panels, panel_bytes, packed, begin, end, fetch, tile) ||
           add_slice_if<Step, 8>(block, panels, panel_bytes, packed, begin, end, fetch, tile) ||
           add_slice_if<Step, 12>(block, panels, panel_bytes, packed, begin, end, fetch, tile));
}

// Widens steps of a panel: a step becomes a line for each part of it.
template <class Step>
void widen_steps(const char* from, std::int64_t steps, char* to) {
    for (std::int64_t step = 0; step < steps; ++step, from += kStepBytes) {
#pragma GCC unroll 4
        for (int part = 0; part < Step::kInputs; ++part, to += kStepBytes) {
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) {
                store(to + i * sizeof(U), Step::weight(load<U>(from + i * sizeof(U)), part));
            }
        }
    }
}

template <class Step, int kPanels>
void multiply_slices(const GemmJob& job, const RowBlock* blocks, std::int64_t count, const char* packed,
                     std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kTile = kMostRows * kPanels * kPanel, kSlice = kSliceSteps<Step>;
    constexpr std::int64_t kWideBytes = is_widened_once<Step> ? kSlice * Step::kInputs * kStepBytes : 0;  // of a panel
    alignas(64) float tiles[kSlicedBlocks * kTile];
    alignas(64) char wide[kPanels * kWideBytes + 1];
    const std::int64_t steps = job.steps(), panel_bytes = steps * kStepBytes;
    const char* panels = job.panels + begin * panel_bytes;
    for (std::int64_t step = 0; step < kSlice && step < steps && begin + kPanels <= end; ++step) {
        for (int panel = 0; panel < kPanels; ++panel) {
            __builtin_prefetch(panels + panel * panel_bytes + step * kStepBytes, 0, 2);
        }
    }
    std::int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels, panels += kPanels * panel_bytes) {
        for (std::int64_t first = 0; first < steps; first += kSlice) {
            const std::int64_t last = first + kSlice < steps ? first + kSlice : steps;
            const bool is_end = last == steps;
            const char* next = !is_end ? panels + last * kStepBytes
                               : panel + 2 * kPanels <= end ? panels + kPanels * panel_bytes
                                                            : nullptr;
            const std::int64_t wanted = next == nullptr ? 0 : kSlice;
            if constexpr (kWideBytes > 0) {
                for (int i = 0; i < kPanels; ++i) {
                    widen_steps<Step>(panels + i * panel_bytes + first * kStepBytes, last - first, wide + i * kWideBytes);
                }
            }
            for (std::int64_t i = 0; i < count; ++i) {
                FetchSlice<kPanels, kWideBytes == 0> fetch{next, panel_bytes, wanted * i / count,
                                                           wanted * (i + 1) / count, (kUnroll + count - 1) / count};
                float* tile = tiles + i * kTile;
                if constexpr (kWideBytes > 0) {
                    constexpr int kParts = Step::kInputs;
                    add_slice<HalvesStep, kPanels>(blocks[i], wide - first * kParts * kStepBytes, kWideBytes, packed,
                                                   first * kParts, last * kParts, fetch, tile);
                } else {
                    add_slice<Step, kPanels>(blocks[i], panels, panel_bytes, packed, first, last, fetch, tile);
                }
            }
        }
        for (std::int64_t i = 0; i < count; ++i) finish_rows_of<kPanels>(job, blocks[i], tiles + i * kTile, panel * kPanel);
    }
    if constexpr (kPanels > 1) {
        if (panel < end) multiply_slices<Step, kPanels / 2>(job, blocks, count, packed, panel, end);
    }
}

template <class Step>
void multiply_blocks(const GemmJob& job, const RowBlock* blocks, std::int64_t count, const char* packed,
                     std::int64_t begin, std::int64_t end) {
    constexpr int kPanels = panels_for(kMostRows, Step::kInputs);
    if (is_widened_once<Step> && count > 1) {
        for (std::int64_t i = 0; i < count; i += kSlicedBlocks) {
            const std::int64_t some = kSlicedBlocks < count - i ? kSlicedBlocks : count - i;
            multiply_slices<Step, kPanels>(job, blocks + i, some, packed, begin, end);
        }
        return;
    }
    if (count > 1 && count <= kSlicedBlocks) {
        multiply_slices<Step, kPanels>(job, blocks, count, packed, begin, end);
        return;
    }
    for (std::int64_t i = 0; i < count; ++i) multiply_rows<Step>(job, blocks[i], packed, begin, end);
}

// True if rows are packed as pairs of bf16 for the dot-product instruction.
inline bool uses_dot(const GemmJob& job) {
#if defined(__AVX512BF16__)
    return job.code == PanelCode::bf16 && (job.is_bf16 || job.rounds_to_bf16) && job.dots_bf16;
#else
    (void)job;
    return false;
#endif
}

std::int64_t divide_rows(const GemmJob& job, RowBlock* blocks, std::int64_t* bytes) {
    const std::int64_t groups = (job.features + windlass::kCodeGroup - 1) / windlass::kCodeGroup;
    const std::int64_t row_bytes =
        job.codes_inputs ? groups * group_bytes(1)
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

// Transposes a square of words of 32 bits: to[i * width + row] = from[row * stride + i] for 4 rows and 4 words.
#if defined(__x86_64__)
WINDLASS_INLINE void transpose_square(__m128 a, __m128 b, __m128 c, __m128 d, float* to, std::int64_t width) {
    const __m128 ab_low = _mm_unpacklo_ps(a, b), ab_high = _mm_unpackhi_ps(a, b);
    const __m128 cd_low = _mm_unpacklo_ps(c, d), cd_high = _mm_unpackhi_ps(c, d);
    _mm_storeu_ps(to, _mm_movelh_ps(ab_low, cd_low));
    _mm_storeu_ps(to + width, _mm_movehl_ps(cd_low, ab_low));
    _mm_storeu_ps(to + 2 * width, _mm_movelh_ps(ab_high, cd_high));
    _mm_storeu_ps(to + 3 * width, _mm_movehl_ps(cd_high, ab_high));
}

WINDLASS_INLINE __m128 four_words(const float* from) { return _mm_loadu_ps(from); }
WINDLASS_INLINE __m128 four_words(const std::uint32_t* from) {
    return _mm_loadu_ps(reinterpret_cast<const float*>(from));
}
WINDLASS_INLINE __m128 four_words(const std::uint16_t* from) {  // bf16, widened
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), halves));
}
#endif

// Two floats that are packed as one word of two bf16.
struct FloatPair {
    float low, high;
};

inline std::uint32_t word_of(FloatPair pair) {
    return bf16_of(pair.low) | static_cast<std::uint32_t>(bf16_of(pair.high)) << 16;
}

#if defined(__AVX512BF16__)
WINDLASS_INLINE __m128 four_words(const FloatPair* from) {
    return (__m128)_mm256_cvtneps_pbh(_mm256_loadu_ps(reinterpret_cast<const float*>(from)));
}
#endif

// Transposes `count` words of those rows that make up whole squares of 4 rows; returns the number of these rows.
// `count` is a multiple of 4.
template <class From>
WINDLASS_INLINE std::int64_t transpose_squares([[maybe_unused]] const From* from, [[maybe_unused]] std::int64_t stride,
                                               [[maybe_unused]] std::int64_t rows, [[maybe_unused]] std::int64_t count,
                                               [[maybe_unused]] void* to, [[maybe_unused]] std::int64_t width) {
    std::int64_t row = 0;
#if defined(__x86_64__)
    for (; row + 4 <= rows; row += 4) {
        const From* at = from + row * stride;
        float* out = static_cast<float*>(to) + row;
        for (std::int64_t i = 0; i < count; i += 4) {
            transpose_square(four_words(at + i), four_words(at + stride + i), four_words(at + 2 * stride + i),
                             four_words(at + 3 * stride + i), out + i * width, width);
        }
    }
#endif
    return row;
}

// Transposes the rows of a block: all rows of the first feature, all rows of the second, ... Padding is 0.
template <class To, class From, class Convert>
WINDLASS_INLINE void transpose_rows(To* to, const From* from, std::int64_t stride, std::int64_t features,
                                    std::int64_t padded_features, const RowBlock& block, Convert convert) {
    constexpr std::int64_t kAtOnce = 32;  // features whose columns stay in the first-level cache
    const std::int64_t width = block.padded;
    for (std::int64_t begin = 0; begin < features; begin += kAtOnce) {
        const std::int64_t end = begin + kAtOnce < features ? begin + kAtOnce : features;
        std::int64_t row = 0;
        if (end - begin == kAtOnce) {
            row = transpose_squares(from + block.first * stride + begin, stride, block.count, kAtOnce,
                                    to + begin * width, width);
        }
        for (; row < block.count; ++row) {
            const From* line = from + (block.first + row) * stride;
            for (std::int64_t i = begin; i < end; ++i) to[i * width + row] = convert(line[i]);
        }
    }
    for (std::int64_t row = 0; row < width; ++row) {
        const std::int64_t from_feature = row < block.count ? features : 0;
        for (std::int64_t i = from_feature; i < padded_features; ++i) to[i * width + row] = To{};
    }
}

// Loads features [first, first + count) of an input row as floats, with zeros up to kCodeGroup.
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

// Writes the words of `steps` steps of one of `rows` rows; see CodedStep.
WINDLASS_INLINE void write_words(const std::int8_t* codes, std::int64_t steps, std::int64_t rows, std::uint32_t* words) {
    for (std::int64_t i = 0; i < 4 * steps; i += 4) {
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

void pack_coded_rows(const GemmJob& job, const RowBlock& block, char* to) {
    constexpr std::int64_t kGroup = windlass::kCodeGroup;
    const std::int64_t rows = block.padded, bytes = group_bytes(rows);
    alignas(64) std::int8_t codes[kMostRows][kGroup] = {};
    for (std::int64_t first = 0; first < job.features; first += kGroup, to += bytes) {
        auto* words = reinterpret_cast<std::uint32_t*>(to);
        for (std::int64_t row = 0; row < rows; ++row) {
            alignas(64) float values[kGroup];
            float scale = 0;
            if (row < block.count) {
                load_group(job, block.first + row, first,
                           job.features - first < kGroup ? job.features - first : kGroup, values);
                scale = code_group(values, codes[row]);
            }
            std::int32_t sum = 0;
            for (std::int64_t i = 0; i < kGroup; ++i) sum += codes[row][i];
            reinterpret_cast<float*>(to)[row] = scale;
            words[rows + row] = static_cast<std::uint32_t>(-128 * sum);
        }
        words += 2 * rows;
        std::int64_t row = 0;
        if constexpr (CodedStep::kInputs == 1) {
            row = transpose_squares(reinterpret_cast<const std::uint32_t*>(codes), kGroup / 4, rows, kGroup / 4, words,
                                    rows);
        }
        for (; row < rows; ++row) write_words(codes[row], kGroupSteps, rows, words + row);
    }
}

// Writes rows as words of two bf16, for the dot product.
void pack_pairs(const GemmJob& job, const RowBlock& block, char* to) {
    auto* words = reinterpret_cast<std::uint32_t*>(to);
    const std::int64_t features = job.features, pairs = features / 2, steps = job.steps();
#if defined(__AVX512BF16__)
    if (features % 2 == 0 && !job.is_bf16) {
        transpose_rows(words, static_cast<const FloatPair*>(job.x), pairs, pairs, steps, block, word_of);
        return;
    }
#endif
    if (features % 2 == 0 && job.is_bf16 && reinterpret_cast<std::uintptr_t>(job.x) % 4 == 0) {
        transpose_rows(words, static_cast<const std::uint32_t*>(job.x), pairs, pairs, steps, block,
                       [](std::uint32_t word) { return word; });
        return;
    }
    const auto half = [&](std::int64_t row, std::int64_t feature) -> std::uint32_t {
        if (row >= block.count || feature >= features) return 0;
        const std::int64_t at = (block.first + row) * features + feature;
        return job.is_bf16 ? static_cast<const std::uint16_t*>(job.x)[at] : bf16_of(static_cast<const float*>(job.x)[at]);
    };
    for (std::int64_t row = 0; row < block.padded; ++row) {
        for (std::int64_t step = 0; step < steps; ++step) {
            words[step * block.padded + row] = half(row, 2 * step) | half(row, 2 * step + 1) << 16;
        }
    }
}

void pack_rows(const GemmJob& job, const RowBlock& block, char* packed) {
    char* to = packed + block.offset;
    if (job.codes_inputs) return pack_coded_rows(job, block, to);
    const std::int64_t features = job.features, padded = job.steps() * windlass::features_per_step(job.code);
    if (uses_dot(job)) {
        pack_pairs(job, block, to);
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
    if (job.rounds_to_bf16 && !uses_dot(job)) {
        auto* values = reinterpret_cast<float*>(to);
        for (std::int64_t i = 0; i < padded * block.padded; ++i) values[i] = float_of(bf16_of(values[i]));
    }
}

void multiply(const GemmJob& job, const RowBlock* blocks, std::int64_t first, std::int64_t last, const char* packed,
              std::int64_t begin, std::int64_t end) {
    const RowBlock* from = blocks + first;
    const std::int64_t count = last - first;
    if (job.codes_inputs) return multiply_blocks<CodedStep>(job, from, count, packed, begin, end);
#if defined(__AVX512BF16__)
    if (uses_dot(job)) return multiply_blocks<DotBf16Step>(job, from, count, packed, begin, end);
#endif
#if defined(WINDLASS_WIDE_INFERENCE)
    windlass::WINDLASS_WIDE_INFERENCE.multiply(job, blocks, first, last, packed, begin, end);
#else
    switch (job.code) {
        case PanelCode::fp32:
            return multiply_blocks<PlainStep>(job, from, count, packed, begin, end);
        case PanelCode::bf16:
            return multiply_blocks<WideBf16Step>(job, from, count, packed, begin, end);
        case PanelCode::int8:
            return multiply_blocks<WideInt8Step>(job, from, count, packed, begin, end);
    }
#endif
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
