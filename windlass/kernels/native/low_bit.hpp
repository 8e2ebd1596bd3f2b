// Products with packed codes of 1 to 8 bits, for the instruction set that the file is compiled for.
//
// A unit of a panel is 32 features of 16 outputs: 8 steps, each a line of bytes with 4 features of each output. Codes of b
// bits hold a unit in b lines: each byte of a line has the codes of 8 / b steps, the first in the lowest bits; codes of 3
// bits have two lines of their two lowest bits, then a line of the highest. A span of units shares a scale.
//
// With int8 inputs the sum of a span is an exact integer; the sums of the spans, times their scales, are added in their
// order. With float inputs the products of a span are added one after the other. So the bits of a row depend neither on
// the other rows nor on the micro-kernel.
#pragma once

#include "gemm.hpp"
#include "low_bit_job.hpp"

namespace {

using windlass::Codes;
using windlass::kGroupUnits;
using windlass::kUnit;
using windlass::kUnitSteps;
using windlass::LowBitJob;

// Rows up to which codes are expanded in registers. More rows pay for a pass that writes bytes.
#if defined(__AVX512F__)
constexpr std::int64_t kNarrowRows = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr std::int64_t kNarrowRows = 4;
#else
constexpr std::int64_t kNarrowRows = 2;
#endif

constexpr std::int64_t kLinesAhead = 32;  // lines of a panel that are requested ahead of their use

WINDLASS_INLINE U shifted(U bits, int right) { return right < 0 ? bits << -right : bits >> right; }

// Bytes of a step from the lines of a unit at `from`, of one vector of outputs. A code of 1 bit counts twice: 0 or 2.
template <Codes kCodes>
WINDLASS_INLINE U step_bytes(const char* from, int step) {
    const auto line = [from](int number) { return load<U>(from + number * kStepBytes); };
    if constexpr (kCodes == Codes::eight || kCodes == Codes::float8) {
        return line(step);
    } else if constexpr (kCodes == Codes::four) {
        return shifted(line(step / 2), 4 * (step % 2)) & 0x0f0f0f0fu;
    } else if constexpr (kCodes == Codes::three) {
        return (shifted(line(step / 4), 2 * (step % 4)) & 0x03030303u) | (shifted(line(2), step - 2) & 0x04040404u);
    } else if constexpr (kCodes == Codes::two) {
        return shifted(line(step / 4), 2 * (step % 4)) & 0x03030303u;
    } else {
        return shifted(line(0), step - 1) & 0x02020202u;
    }
}

// Exact sums of products of unsigned bytes `w` and signed bytes `x`, four to a lane. `Sum` may be narrower than 32 bits:
// it holds kRun units. `kPlanes` is the number of passes over a byte of which each sees a part that `Sum` has room for.
#if defined(__AVX512VNNI__)
template <int>
struct ByteSum {
    using Sum = I;
    static constexpr int kRun = kGroupUnits, kPlanes = 1;
    static WINDLASS_INLINE U plane(U w, int) { return w; }
    static WINDLASS_INLINE I add(I sum, U w, U x) { return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
    static WINDLASS_INLINE I wide(I sum, int) { return sum; }
};
#elif defined(__AVX2__)
template <int kBits>
struct ByteSum {  // pairs of products in 16 bits: at most 2 * 127 * (2^bits - 1), times 8 steps of a unit
    using Sum = SignedHalves;
    static constexpr int kRun = kBits <= 2 ? 4 : kBits == 3 ? 2 : 1, kPlanes = kBits == 8 ? 2 : 1;
    static WINDLASS_INLINE U plane(U w, int number) {
        if constexpr (kPlanes == 1) return w;
        return shifted(w, 4 * number) & 0x0f0f0f0fu;
    }
#if defined(__AVX512BW__)
    static WINDLASS_INLINE Sum add(Sum sum, U w, U x) { return sum + (Sum)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
    static WINDLASS_INLINE I wide(Sum sum, int number) {
        return (I)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)) << (4 * number);
    }
#else
    static WINDLASS_INLINE Sum add(Sum sum, U w, U x) { return sum + (Sum)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
    static WINDLASS_INLINE I wide(Sum sum, int number) {
        return (I)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) << (4 * number);
    }
#endif
};
#else
template <int>
struct ByteSum {
    using Sum = I;
    static constexpr int kRun = kGroupUnits, kPlanes = 1;
    static WINDLASS_INLINE U plane(U w, int) { return w; }
    static WINDLASS_INLINE I add(I sum, U w, U x) {
        const I first = (I)(w & 0xffu) * ((I)(x << 24) >> 24), second = (I)((w >> 8) & 0xffu) * ((I)(x << 16) >> 24);
        const I third = (I)((w >> 16) & 0xffu) * ((I)(x << 8) >> 24), fourth = (I)(w >> 24) * ((I)x >> 24);
        return sum + ((first + second) + (third + fourth));
    }
    static WINDLASS_INLINE I wide(I sum, int) { return sum; }
};
#endif

template <Codes kCodes>
constexpr int bits_of_codes() {
    return kCodes == Codes::one ? 2 : windlass::lines_of(kCodes);  // a code of 1 bit counts twice
}

WINDLASS_INLINE F widen_scales(const std::uint16_t* from) { return widen_fp16(load<Half>(from)); }

WINDLASS_INLINE F widen_zeros(const std::uint8_t* from) {
    return __builtin_convertvector(__builtin_convertvector(load<Byte>(from), U), F);
}

// Where a tile of panels reads: lines, scales and zeros of each panel.
template <int kPanels>
struct TilePlace {
    const char* lines[kPanels];
    const std::uint16_t* scales[kPanels];
    const std::uint8_t* zeros[kPanels];

    TilePlace(const LowBitJob& job, std::int64_t panel) {
        const std::int64_t spans = job.spans();
        for (int i = 0; i < kPanels; ++i) {
            lines[i] = job.panels + (panel + i) * job.panel_bytes();
            scales[i] = job.group_scales == nullptr ? nullptr : job.group_scales + (panel + i) * spans * kPanel;
            zeros[i] = job.zeros == nullptr ? nullptr : job.zeros + (panel + i) * spans * kPanel;
        }
    }
};

// Packed int8 inputs of a block: for each group of 128 features `rows` scales, then for each of its spans `rows` first
// sums and the words of its steps: 4 bytes a row. Float inputs: `rows` floats for each feature.
inline std::int64_t row_bytes_of(const LowBitJob& job) {
    if (!job.codes_inputs) return job.units() * kUnit * 4;
    const std::int64_t groups = (job.units() + kGroupUnits - 1) / kGroupUnits;
    return 4 * (groups + job.spans() + job.units() * kUnitSteps);
}

template <Codes kCodes, int kBits, int kRows, int kPanels>
void multiply_bytes_tile(const LowBitJob& job, std::int64_t panel, const char* packed, float* tile) {
    using Add = ByteSum<kBits>;
    constexpr int kColumns = kPanels * kVectors;
    constexpr std::int64_t kUnitBytes = kStepBytes * windlass::lines_of(kCodes);
    TilePlace<kPanels> place(job, panel);
    std::memset(tile, 0, 4 * kRows * kPanels * kPanel);
    const std::int64_t units = job.units();
    const float* scales = nullptr;
    for (std::int64_t begin = 0, span = 0; begin < units; begin += job.span_units, ++span) {
        if (begin % kGroupUnits == 0) {
            scales = reinterpret_cast<const float*>(packed);
            packed += 4 * kRows;
        }
        const auto* firsts = reinterpret_cast<const std::int32_t*>(packed);
        const auto* words = reinterpret_cast<const std::uint32_t*>(packed) + kRows;
        const std::int64_t end = begin + job.span_units < units ? begin + job.span_units : units;
        I sums[kRows][kColumns];
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                sums[row][column] = job.zeros == nullptr ? I{} + firsts[row] : I{};
            }
        }
        for (std::int64_t run = begin; run < end; run += Add::kRun) {
            const std::int64_t stop = run + Add::kRun < end ? run + Add::kRun : end;
            for (int plane = 0; plane < Add::kPlanes; ++plane) {
                typename Add::Sum parts[kRows][kColumns];
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                    for (int column = 0; column < kColumns; ++column) {
                        if constexpr (std::is_same_v<typename Add::Sum, I>) {
                            parts[row][column] = sums[row][column];
                        } else {
                            parts[row][column] = typename Add::Sum{};
                        }
                    }
                }
                for (std::int64_t unit = run; unit < stop; ++unit) {
                    const std::int64_t at = unit * kUnitBytes;
                    const std::uint32_t* x = words + (unit - begin) * kUnitSteps * kRows;
#pragma GCC unroll 16
                    for (int i = 0; i < kPanels; ++i) {
                        for (int line = 0; line < windlass::lines_of(kCodes); ++line) {
                            __builtin_prefetch(place.lines[i] + at + (kLinesAhead + line) * kStepBytes, 0, 2);
                        }
                    }
#pragma GCC unroll 8
                    for (int step = 0; step < kUnitSteps; ++step) {
                        U weights[kColumns];
#pragma GCC unroll 16
                        for (int column = 0; column < kColumns; ++column) {
                            const char* from = place.lines[column / kVectors] + at + column % kVectors * sizeof(U);
                            weights[column] = Add::plane(step_bytes<kCodes>(from, step), plane);
                        }
#pragma GCC unroll 16
                        for (int row = 0; row < kRows; ++row) {
                            const U spread = all_bits(x[step * kRows + row]);
#pragma GCC unroll 16
                            for (int column = 0; column < kColumns; ++column) {
                                parts[row][column] = Add::add(parts[row][column], weights[column], spread);
                            }
                        }
                    }
                }
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                    for (int column = 0; column < kColumns; ++column) {
                        if constexpr (std::is_same_v<typename Add::Sum, I>) {
                            sums[row][column] = parts[row][column];
                        } else {
                            sums[row][column] += Add::wide(parts[row][column], plane);
                        }
                    }
                }
            }
        }
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            const int i = column / kVectors;
            const std::int64_t at = span * kPanel + column % kVectors * kLanes;
            const F weight_scale = place.scales[i] == nullptr ? all(1.0f) : widen_scales(place.scales[i] + at);
            const F zero = job.zeros == nullptr ? F{} : widen_zeros(place.zeros[i] + at);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                F sum = __builtin_convertvector(sums[row][column], F);  // exact, as is the next line
                if (job.zeros != nullptr) sum = sum - zero * all(static_cast<float>(firsts[row]));
                float* total = tile + (row * kColumns + column) * kLanes;
                store(total, multiply_add(sum * weight_scale, all(scales[row]), load<F>(total)));
            }
        }
        packed += 4 * kRows * (1 + (end - begin) * kUnitSteps);
    }
}

// Byte `part` of each lane as a float above 2^23, whose lowest bits are the code: a subtraction gives the number.
template <Codes kCodes>
WINDLASS_INLINE F code_float(U bytes, int part, F offset) {
    if constexpr (kCodes == Codes::float8) {  // sign, 4 bits of exponent (bias 7), 3 of mantissa
        const U byte = (bytes >> (8 * part)) & 0xffu;
        // By way of a half, whose exponent has a bias of 15. Normal and subnormal numbers are exact.
        const U half = ((byte & 0x80u) << 8) | ((byte & 0x7fu) << 7);
        return widen_fp16(__builtin_convertvector(half, Half)) * all(256.0f) - offset;
    }
    return (F)(((bytes >> (8 * part)) & 0xffu) | 0x4b000000u) - offset;
}

// Numbers of codes of 1, 2 and 4 bits by a table in a register: the lowest bits of a lane select an entry, whatever is
// above them. Fewer operations than a conversion.
#if defined(__AVX512F__)
constexpr int kTableBits = 4;
WINDLASS_INLINE F look_up(F table, U bits) { return (F)_mm512_permutexvar_ps((__m512i)bits, (__m512)table); }
#elif defined(__AVX2__)
constexpr int kTableBits = 3;
WINDLASS_INLINE F look_up(F table, U bits) { return (F)_mm256_permutevar8x32_ps((__m256)table, (__m256i)bits); }
#else
constexpr int kTableBits = 0;
WINDLASS_INLINE F look_up(F table, U) { return table; }
#endif

template <Codes kCodes>
constexpr bool has_table() {
    const int bits = windlass::lines_of(kCodes);
    return (bits == 1 || bits == 2 || bits == 4) && bits <= kTableBits;
}

template <Codes kCodes>
WINDLASS_INLINE F make_table(int zero) {
    F table = {};
    for (int i = 0; i < (1 << kTableBits) && i < kLanes; ++i) {
        const int code = kCodes == Codes::one ? 2 * (i & 1) : i & ((1 << windlass::lines_of(kCodes)) - 1);
        table[i] = static_cast<float>(code - zero);
    }
    return table;
}

template <Codes kCodes, int kRows, int kPanels, bool kTable>
void multiply_float_tile(const LowBitJob& job, std::int64_t panel, const char* packed, float* tile) {
    constexpr int kColumns = kPanels * kVectors;
    constexpr std::int64_t kUnitBytes = kStepBytes * windlass::lines_of(kCodes);
    constexpr float kMagic = kCodes == Codes::float8 ? 0.0f : 8388608.0f;
    TilePlace<kPanels> place(job, panel);
    std::memset(tile, 0, 4 * kRows * kPanels * kPanel);
    const std::int64_t units = job.units();
    const auto* x = reinterpret_cast<const float*>(packed);
    F table = {};
    if constexpr (kTable) table = make_table<kCodes>(job.zero);
    for (std::int64_t begin = 0, span = 0; begin < units; begin += job.span_units, ++span) {
        const std::int64_t end = begin + job.span_units < units ? begin + job.span_units : units;
        F sums[kRows][kColumns], offsets[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            const std::int64_t at = span * kPanel + column % kVectors * kLanes;
            offsets[column] = job.zeros == nullptr ? all(kMagic + static_cast<float>(job.zero))
                                                   : all(kMagic) + widen_zeros(place.zeros[column / kVectors] + at);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) sums[row][column] = F{};
        }
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t from = unit * kUnitBytes;
#pragma GCC unroll 16
            for (int i = 0; i < kPanels; ++i) {
                for (int line = 0; line < windlass::lines_of(kCodes); ++line) {
                    __builtin_prefetch(place.lines[i] + from + (kLinesAhead + line) * kStepBytes, 0, 2);
                }
            }
            constexpr int kBits = windlass::lines_of(kCodes), kSteps = kTable ? 8 / kBits : 1;  // of a line
#pragma GCC unroll 8
            for (int step = 0; step < kUnitSteps; ++step) {
                U bytes[kColumns];
#pragma GCC unroll 16
                for (int column = 0; column < kColumns; ++column) {
                    const char* at = place.lines[column / kVectors] + from + column % kVectors * sizeof(U);
                    if constexpr (kTable) {
                        bytes[column] = load<U>(at + step / kSteps * kStepBytes) >> (kBits * (step % kSteps));
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
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            const int i = column / kVectors;
            const std::int64_t at = span * kPanel + column % kVectors * kLanes;
            const F scale = place.scales[i] == nullptr ? all(1.0f) : widen_scales(place.scales[i] + at);
#pragma GCC unroll 16
            for (int row = 0; row < kRows; ++row) {
                float* total = tile + (row * kColumns + column) * kLanes;
                store(total, multiply_add(sums[row][column], scale, load<F>(total)));
            }
        }
    }
}

template <Codes kCodes, int kBits, int kRows, int kPanels>
void multiply_low_block(const LowBitJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                        std::int64_t end) {
    alignas(64) float tile[kRows * kPanels * kPanel];
    std::int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels) {
        const char* input = packed + block.offset;
        bool done = false;
        if constexpr (kCodes != Codes::float8) {
            if (job.codes_inputs) {
                multiply_bytes_tile<kCodes, kBits, kRows, kPanels>(job, panel, input, tile);
                done = true;
            }
        }
        if constexpr (has_table<kCodes>()) {
            if (!done && job.zeros == nullptr) {
                multiply_float_tile<kCodes, kRows, kPanels, true>(job, panel, input, tile);
                done = true;
            }
        }
        if (!done) multiply_float_tile<kCodes, kRows, kPanels, false>(job, panel, input, tile);
        finish_rows_of<kPanels>(job, block, tile, panel * kPanel);
    }
    if constexpr (kPanels > 1) {
        if (panel < end) multiply_low_block<kCodes, kBits, kRows, 1>(job, block, packed, panel, end);
    }
}

template <Codes kCodes, int kBits, int kRows>
WINDLASS_INLINE bool multiply_low_if(const LowBitJob& job, const RowBlock& block, const char* packed,
                                     std::int64_t begin, std::int64_t end) {
    constexpr bool kBytes = kCodes == Codes::eight || kCodes == Codes::float8;
    if constexpr (kBytes ? kRows <= kMostRows : kRows <= kNarrowRows && kRows != 6) {
        if (block.padded != kRows) return false;
        multiply_low_block<kCodes, kBits, kRows, panels_for(kRows, 2)>(job, block, packed, begin, end);
        return true;
    }
    return false;
}

template <Codes kCodes, int kBits = bits_of_codes<kCodes>()>
void multiply_low_rows(const LowBitJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                       std::int64_t end) {
    (void)(multiply_low_if<kCodes, kBits, 1>(job, block, packed, begin, end) ||
           multiply_low_if<kCodes, kBits, 2>(job, block, packed, begin, end) ||
           multiply_low_if<kCodes, kBits, 4>(job, block, packed, begin, end) ||
           multiply_low_if<kCodes, kBits, 6>(job, block, packed, begin, end) ||
           multiply_low_if<kCodes, kBits, 8>(job, block, packed, begin, end) ||
           multiply_low_if<kCodes, kBits, 12>(job, block, packed, begin, end));
}

void low_bit_multiply(const LowBitJob& job, const RowBlock* blocks, std::int64_t first, std::int64_t last,
                      const char* packed, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = first; i < last; ++i) {
        const RowBlock& block = blocks[i];
        if (job.expanded && job.codes != Codes::eight) {
            // The bytes are small, which matters where sums are narrow.
            multiply_low_rows<Codes::eight, 4>(job, block, packed, begin, end);
            continue;
        }
        switch (job.codes) {
            case Codes::one:
                multiply_low_rows<Codes::one>(job, block, packed, begin, end);
                break;
            case Codes::two:
                multiply_low_rows<Codes::two>(job, block, packed, begin, end);
                break;
            case Codes::three:
                multiply_low_rows<Codes::three>(job, block, packed, begin, end);
                break;
            case Codes::four:
                multiply_low_rows<Codes::four>(job, block, packed, begin, end);
                break;
            case Codes::eight:
                multiply_low_rows<Codes::eight>(job, block, packed, begin, end);
                break;
            case Codes::float8:
                multiply_low_rows<Codes::float8>(job, block, packed, begin, end);
                break;
        }
    }
}

bool low_bit_expands(const LowBitJob& job) {
    return job.rows > kNarrowRows && job.codes != Codes::eight && job.codes != Codes::float8;
}

template <Codes kCodes>
void expand_panels(const LowBitJob& job, std::int64_t begin, std::int64_t end, char* to) {
    const char* from = job.panels + begin * job.panel_bytes();
    const std::int64_t units = (end - begin) * job.units();
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

void low_bit_expand(const LowBitJob& job, std::int64_t begin, std::int64_t end, char* to) {
    switch (job.codes) {
        case Codes::one:
            return expand_panels<Codes::one>(job, begin, end, to);
        case Codes::two:
            return expand_panels<Codes::two>(job, begin, end, to);
        case Codes::three:
            return expand_panels<Codes::three>(job, begin, end, to);
        case Codes::four:
            return expand_panels<Codes::four>(job, begin, end, to);
        default:
            return;
    }
}

std::int64_t low_bit_divide(const LowBitJob& job, RowBlock* blocks, std::int64_t* bytes) {
    const bool narrow = job.codes != Codes::eight && job.codes != Codes::float8 && !low_bit_expands(job);
    const std::int64_t most = narrow ? kNarrowRows : kMostRows;
    const std::int64_t row_bytes = row_bytes_of(job), number = (job.rows + most - 1) / most;
    std::int64_t first = 0, offset = 0, used = 0;
    for (; first < job.rows; ++used) {
        const std::int64_t left = number - used;
        std::int64_t count = (job.rows - first + left - 1) / left;
        const std::int64_t padded = narrow && count > 4 ? 8 : padded_rows(count);
        if (count < padded && first + count < job.rows) count = padded < job.rows - first ? padded : job.rows - first;
        blocks[used] = {first, count, padded, offset};
        first += count;
        offset += (padded * row_bytes + 63) / 64 * 64;
    }
    *bytes = offset;
    return used;
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
                for (; from < stop; from += 4, word += rows) *word = load<std::uint32_t>(from);
                at += 4 * rows * (end - span) * kUnitSteps;
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
    const std::int64_t most = low_bit_expands(job) ? kMostRows : job.rows < kMostRows ? job.rows : kMostRows;
    return panels_for(static_cast<int>(padded_rows(most)), 2);
}

}  // namespace
