// Products with packed codes of 1 to 8 bits, for the instruction set that the file is compiled for.
//
// A unit of a panel is 32 features of 16 outputs: 8 steps, each a line of bytes with 4 features of each output. Codes of b
// bits hold a unit in b lines: each byte of a line has the codes of 8 / b steps, the first in the lowest bits; codes of 3
// bits have two lines of their two lowest bits, then a line of the highest. A span of units shares a scale.
//
// With int8 inputs the sum of a span is an exact integer; the sums of the spans, times their scales, are added in their
// order. With float inputs the products of a span are added one after the other. So the bits of a row depend neither on
// the other rows nor on the micro-kernel.
//
// Products of few rows are in low_bit_byte_rows.cpp (int8 inputs) and low_bit_float_rows.hpp, those of many rows in
// low_bit_slices.hpp. There are several files because a compiler takes minutes for all of them.
#pragma once

#include "gemm.hpp"
#include "low_bit_job.hpp"

#define WINDLASS_JOIN_OF(first, second) first##second
#define WINDLASS_JOIN(first, second) WINDLASS_JOIN_OF(first, second)
#define WINDLASS_BYTE_ROWS WINDLASS_JOIN(WINDLASS_SET, ByteRows)
#define WINDLASS_FEW_BITS WINDLASS_JOIN(WINDLASS_SET, FewBits)
#define WINDLASS_MORE_BITS WINDLASS_JOIN(WINDLASS_SET, MoreBits)

namespace windlass {
extern const FewRows WINDLASS_BYTE_ROWS, WINDLASS_FEW_BITS, WINDLASS_MORE_BITS;
}

namespace {

using windlass::Codes;
using windlass::kGroupUnits;
using windlass::kUnit;
using windlass::kUnitSteps;
using windlass::LowBitJob;

// Largest numbers of rows for which codes are expanded in registers: with int8 inputs in one block and in two, and with
// float inputs.
#if defined(__AVX512VNNI__)
constexpr std::int64_t kNarrowRows = 12, kPairRows = 16, kNarrowFloatRows = 8;
#elif defined(__AVX512F__)
constexpr std::int64_t kNarrowRows = 8, kPairRows = 0, kNarrowFloatRows = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr std::int64_t kNarrowRows = 4, kPairRows = 0, kNarrowFloatRows = 4;
#else
constexpr std::int64_t kNarrowRows = 2, kPairRows = 0, kNarrowFloatRows = 2;
#endif

constexpr int kPairBlock = 8, kPairPanels = 2;  // rows of a block of a pair, and panels

// Float inputs use no dot products: for float inputs, a set with dot products calls the set without them,
// WINDLASS_WIDE_LOWBIT, since its own code would be the same.
#if defined(WINDLASS_WIDE_LOWBIT)
constexpr bool kHasFloats = false;
#else
constexpr bool kHasFloats = true;
#endif

// Lines of all panels of a tile between the prefetch into the second-level cache and the use; and units between the
// prefetch into the first-level cache and the use.
constexpr std::int64_t kLinesAhead = 256, kNearUnits = 4;
constexpr std::int64_t kByteSlice = 16;    // units of a slice of bytes; with two panels a third of the first-level cache
constexpr std::int64_t kFloatSlice = 4;    // the same for floats; a multiple of every span, as is kByteSlice

WINDLASS_INLINE U shifted(U bits, int right) { return right < 0 ? bits << -right : bits >> right; }

// Bytes of a step from the lines of a unit at `from`, of one vector of outputs. A code of 1 bit counts twice: 0 or 2.
template <Codes kCodes>
WINDLASS_INLINE U step_bytes(const char* from, int step) {
    const auto line = [from](int number) { return load<U>(from + number * kStepBytes); };
    if constexpr (kCodes == Codes::eight || kCodes == Codes::float8 || kCodes == Codes::halves) {
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

// Steps after which codes are in the same bits of the next line. Loops over the steps of a unit are unrolled by them:
// by all steps, the code would be up to eight times as long, not faster, and take minutes to compile.
template <Codes kCodes>
constexpr int period_of() {
    return kCodes == Codes::three ? kUnitSteps : 8 / windlass::lines_of(kCodes);
}

// Codes of a plane are in the same bits of all lines: a mask without a shift gives the codes times a power of two.
// Sums are shifted between planes, which pays for few rows.
template <Codes kCodes, int kRows>
constexpr int planes_of() {
    constexpr int kBits = windlass::lines_of(kCodes);
    constexpr bool kMasked = (kCodes == Codes::one && kRows <= 4) || (kCodes == Codes::two && kRows <= 8) || kCodes == Codes::four;
    return kMasked ? 8 / kBits : 1;
}

// Exponent of that power of two.
template <Codes kCodes>
constexpr int plane_power(int plane) {
    if (kCodes == Codes::one) return plane == 0 ? 0 : plane - 1;  // a code of 1 bit counts twice
    return plane * windlass::lines_of(kCodes);
}

template <Codes kCodes, int kPlanes>
WINDLASS_INLINE U plane_bytes(const char* from, int line, int plane) {
    if constexpr (kPlanes == 1) return step_bytes<kCodes>(from, line);
    if (kCodes == Codes::one && plane == 0) return step_bytes<kCodes>(from, 0);
    constexpr std::uint32_t kOnes = kCodes == Codes::one ? 0x01010101u : kCodes == Codes::two ? 0x03030303u : 0x0f0f0f0fu;
    return load<U>(from + line * kStepBytes) & (kOnes << (plane * windlass::lines_of(kCodes)));
}

// Exact sums of products of unsigned bytes `w` and signed bytes `x`, four to a lane. `Sum` may be narrower than 32
// bits: it holds kRun units. Bytes `w` of 8 bits take kPlanes passes: each adds the products with a word of 4 bits of
// the inputs, since `Sum` has no room for more.
#if defined(WINDLASS_BYTE_DOTS)
template <int>
struct ByteSum {
    using Sum = I;
    static constexpr int kRun = kGroupUnits, kPlanes = 1;
    static WINDLASS_INLINE I add(I sum, U w, U x) { return add_byte_products(sum, w, x); }
    static WINDLASS_INLINE I wide(I sum, int) { return sum; }
};
#elif defined(__AVX2__)
template <int kBits>
struct ByteSum {
    // Pairs of products in 16 bits: at most 2 * 127 * (2^bits - 1), or 2 * 8 * 255, times 8 steps of a unit.
    using Sum = SignedHalves;
    static constexpr int kRun = kBits <= 2 ? 4 : kBits == 3 ? 2 : 1, kPlanes = kBits == 8 ? 2 : 1;
#if defined(__AVX512BW__)
    static WINDLASS_INLINE Sum add(Sum sum, U w, U x) {
        return computed_here(sum + (Sum)_mm512_maddubs_epi16((__m512i)w, (__m512i)x));
    }
    static WINDLASS_INLINE I wide(Sum sum, int number) {
        return (I)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)) << (4 * number);
    }
#else
    static WINDLASS_INLINE Sum add(Sum sum, U w, U x) {
        return computed_here(sum + (Sum)_mm256_maddubs_epi16((__m256i)w, (__m256i)x));
    }
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
    static WINDLASS_INLINE I add(I sum, U w, U x) {
        const I first = (I)(w & 0xffu) * ((I)(x << 24) >> 24), second = (I)((w >> 8) & 0xffu) * ((I)(x << 16) >> 24);
        const I third = (I)((w >> 16) & 0xffu) * ((I)(x << 8) >> 24), fourth = (I)(w >> 24) * ((I)x >> 24);
        return sum + ((first + second) + (third + fourth));
    }
    static WINDLASS_INLINE I wide(I sum, int) { return sum; }
};
#endif

// Halves are multiplied as gemm.hpp does it, from inputs that are packed for it.
template <>
struct ByteSum<16> {
    using Sum = I;
    static constexpr int kPlanes = CodedStep::kInputs;
    static WINDLASS_INLINE I add(I sum, U w, U x) { return HalvesStep::add(sum, x, w); }
};

// Words of input of a unit and row.
template <int kBits>
constexpr int unit_words = kUnitSteps * ByteSum<kBits>::kPlanes;

template <Codes kCodes>
constexpr int bits_of_codes() {
    return kCodes == Codes::one ? 2 : windlass::lines_of(kCodes);  // a code of 1 bit counts twice
}

WINDLASS_INLINE F widen_scales(const std::uint16_t* from) { return widen_fp16(load<Half>(from)); }

WINDLASS_INLINE F widen_zeros(const std::uint8_t* from) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (F)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(load<Byte>(from), U), F);
#endif
}

// Addresses that a tile of panels reads: lines, scales, zeros and shifts of each panel.
template <int kPanels>
struct TilePlace {
    const char* lines[kPanels];
    const std::uint16_t* scales[kPanels];
    const std::uint8_t* zeros[kPanels];
    const float* wide_scales[kPanels];
    const float* shifts[kPanels];

    TilePlace(const LowBitJob& job, std::int64_t panel) {
        const std::int64_t spans = job.spans();
        for (int i = 0; i < kPanels; ++i) {
            lines[i] = job.panels + (panel + i) * job.panel_bytes();
            scales[i] = job.group_scales == nullptr ? nullptr : job.group_scales + (panel + i) * spans * kPanel;
            zeros[i] = job.zeros == nullptr ? nullptr : job.zeros + (panel + i) * spans * kPanel;
            wide_scales[i] = job.wide_scales == nullptr ? nullptr : job.wide_scales + (panel + i) * spans * kPanel;
            shifts[i] = job.shifts == nullptr ? nullptr : job.shifts + (panel + i) * spans * kPanel;
        }
    }
};

// True if rows are one block that expands codes in registers.
bool is_narrow(const LowBitJob& job) { return job.rows <= (job.codes_inputs ? kNarrowRows : kNarrowFloatRows); }

// True if rows are two blocks that expand codes in registers, one after the other.
bool is_pair(const LowBitJob& job) { return job.codes_inputs && !is_narrow(job) && job.rows <= kPairRows; }

// True if slices of codes of 8 bits are widened to halves, which takes fewer operations than two passes of 4 bits.
bool is_widened(const LowBitJob& job) {
    return is_widened_once<CodedStep> && job.codes == Codes::eight && job.codes_inputs && !is_narrow(job);
}

// Words of int8 inputs of a step and row.
inline std::int64_t step_words(const LowBitJob& job) {
    return job.codes != Codes::eight ? 1 : is_widened(job) ? CodedStep::kInputs : ByteSum<8>::kPlanes;
}

// Bytes of a row in the packed input of a block. int8 inputs: for each group of 128 features `rows` scales, then for
// each of its spans `rows` first sums and the words of its steps: 4 bytes a row; 4 halves if codes are widened; or the
// 4 lower bits of 4 bytes, then the higher, see split_inputs. Float inputs: `rows` floats for each feature.
inline std::int64_t row_bytes_of(const LowBitJob& job) {
    if (!job.codes_inputs) return job.units() * kUnit * 4;
    const std::int64_t groups = (job.units() + kGroupUnits - 1) / kGroupUnits;
    return 4 * (groups + job.spans() + job.units() * kUnitSteps * step_words(job));
}

// Prefetches codes of kPanels panels ahead of their use and, near the end of the panels, of the next kPanels; and
// scales of the next panels.
template <int kPanels>
struct FetchPanels {
    static constexpr std::int64_t kAhead = kLinesAhead / kPanels;  // lines of a panel
    std::int64_t panel_bytes, turn, scales;  // `turn`: units before the first prefetch of the next panels
    std::int64_t share = -1;                 // in a pair of blocks: only units of this parity
    std::int64_t ahead = 0;
    bool wanted = true;

    FetchPanels(const LowBitJob& job, std::int64_t lines)
        : panel_bytes(job.panel_bytes()),
          turn(job.units() > kAhead / lines ? job.units() - kAhead / lines : 0),
          scales(kPanels * job.spans() * kPanel) {}

    WINDLASS_INLINE void begin(std::int64_t unit) {
        ahead = kAhead * kStepBytes + (unit < turn ? 0 : (kPanels - 1) * panel_bytes);
        wanted = share < 0 || unit % 2 == share;
    }

    template <int kLines>
    WINDLASS_INLINE void unit(const char* const (&at)[kPanels], std::int64_t offset) {
        if (!wanted) return;
#pragma GCC unroll 16
        for (int i = 0; i < kPanels; ++i) {
#pragma GCC unroll 8
            for (int line = 0; line < kLines; ++line) {
                // Of whole bytes in many panels the hardware fetches the lines after the first, and more requests slow
                // it down by a tenth. Requests for few panels do not, and short panels need them.
                if (kLines < 8 || kPanels < 8 || line == 0) __builtin_prefetch(at[i] + ahead + (offset + line * kStepBytes), 0, 2);
                // Whole bytes arrive in time, and are too many for a second prefetch.
                if constexpr (kLines < 8) __builtin_prefetch(at[i] + (offset + (line + kNearUnits * kLines) * kStepBytes));
            }
        }
    }

    WINDLASS_INLINE void span(const TilePlace<kPanels>& place, std::int64_t number) const {
        if (number % 2 != 0) return;  // a line has the scales of two spans, or the zeros of four
#pragma GCC unroll 16
        for (int i = 0; i < kPanels; ++i) {
            if (place.scales[i] != nullptr) __builtin_prefetch(place.scales[i] + number * kPanel + scales, 0, 2);
            if (place.zeros[i] != nullptr) __builtin_prefetch(place.zeros[i] + number * kPanel + scales, 0, 2);
        }
    }
};

// Prefetches lines [next, last) of the panels of the next slice at `slice`, `rate` of each panel for every unit.
template <int kPanels>
struct FetchPart {
    const char* slice;
    std::int64_t panel_bytes, next, last, rate;

    WINDLASS_INLINE void begin(std::int64_t) {}

    template <int>
    WINDLASS_INLINE void unit(const char* const (&)[kPanels], std::int64_t) {
        for (const std::int64_t end = next + rate < last ? next + rate : last; next < end; ++next) {
#pragma GCC unroll 16
            for (int i = 0; i < kPanels; ++i) __builtin_prefetch(slice + i * panel_bytes + next * kStepBytes, 0, 2);
        }
    }

    WINDLASS_INLINE void span(const TilePlace<kPanels>&, std::int64_t) const {}
};

// Adds the products of units [begin, end) of a span to `sums`. `x` has the words of unit `begin`. kUnits is the number
// of units if it is known at compile time, so that addresses differ by constants, which helps with many panels; else 0.
template <Codes kCodes, int kBits, int kRows, int kPanels, int kUnits, class Fetch>
WINDLASS_INLINE void add_byte_units(const TilePlace<kPanels>& place, std::int64_t begin, std::int64_t end,
                                    const std::uint32_t* x, Fetch& fetch, I (&sums)[kRows][kPanels * kVectors]) {
    using Add = ByteSum<kBits>;
    constexpr int kColumns = kPanels * kVectors, kLines = windlass::lines_of(kCodes);
    constexpr std::int64_t kUnitBytes = kStepBytes * kLines;
    const char* at[kPanels];
#pragma GCC unroll 16
    for (int i = 0; i < kPanels; ++i) at[i] = place.lines[i] + begin * kUnitBytes;
    const std::int64_t units = kUnits > 0 ? kUnits : end - begin;
    const auto add = [&](auto& parts, std::int64_t unit, int word, const auto& weight) __attribute__((always_inline)) {
        U weights[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            weights[column] = weight(at[column / kVectors] + (unit * kUnitBytes + column % kVectors * sizeof(U)));
        }
        const std::uint32_t* words = x + (unit * unit_words<kBits> + word) * kRows;
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            const U spread = all_bits(words[row]);
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                parts[row][column] = Add::add(parts[row][column], weights[column], spread);
            }
        }
    };
    if constexpr (kUnits > 0) fetch.begin(begin);
    if constexpr (std::is_same_v<typename Add::Sum, I>) {
        constexpr int kPlanes = planes_of<kCodes, kRows>(), kSteps = unit_words<kBits> / kPlanes;  // of a unit in a plane
        const auto add_unit = [&](std::int64_t unit, int plane) __attribute__((always_inline)) {
            if (plane == kPlanes - 1) {
                if constexpr (kUnits == 0) fetch.begin(begin + unit);
                fetch.template unit<kLines>(at, unit * kUnitBytes);
            }
#pragma GCC unroll 16
            for (int line = 0; line < kSteps; ++line) {
                add(sums, unit, line * kPlanes + plane, [=](const char* from) __attribute__((always_inline)) {
                    return plane_bytes<kCodes, planes_of<kCodes, kRows>()>(from, line, plane);
                });
            }
        };
#pragma GCC unroll 8
        for (int plane = kPlanes - 1; plane >= 0; --plane) {
            // Each plane loads the lines again, from the first-level cache. Else the compiler would keep all of them
            // for the next planes, in registers that the sums need.
            asm volatile("" ::: "memory");
            if constexpr (kUnits > 0) {
#pragma GCC unroll 4
                for (int unit = 0; unit < kUnits; ++unit) add_unit(unit, plane);
            } else {
                for (std::int64_t unit = 0; unit < units; ++unit) add_unit(unit, plane);
            }
            const int fall = plane == 0 ? 0 : plane_power<kCodes>(plane) - plane_power<kCodes>(plane - 1);
            if (fall != 0) {  // exact: the sums are multiples of 2^fall
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                    for (int column = 0; column < kColumns; ++column) sums[row][column] >>= fall;
                }
            }
        }
    } else {
        // All steps for slices, whose lines are in the first-level cache: with fewer they take 10 to 30 % longer.
        constexpr int kPeriod = std::is_same_v<Fetch, FetchPart<kPanels>> ? kUnitSteps : period_of<kCodes>();
        for (std::int64_t run = 0; run < units; run += Add::kRun) {
            const std::int64_t stop = run + Add::kRun < units ? run + Add::kRun : units;
            for (int plane = 0; plane < Add::kPlanes; ++plane) {
                typename Add::Sum parts[kRows][kColumns];
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                    for (int column = 0; column < kColumns; ++column) parts[row][column] = typename Add::Sum{};
                }
                for (std::int64_t unit = run; unit < stop; ++unit) {
                    if (plane == 0) {
                        fetch.begin(begin + unit);
                        fetch.template unit<kLines>(at, unit * kUnitBytes);
                    }
#pragma GCC unroll 1
                    for (int first = 0; first < kUnitSteps; first += kPeriod) {
#pragma GCC unroll 8
                        for (int step = 0; step < kPeriod; ++step) {
                            const int word = (first + step) * Add::kPlanes + plane;
                            add(parts, unit, word, [first, step](const char* from) __attribute__((always_inline)) {
                                return step_bytes<kCodes>(from + first / kPeriod * kStepBytes, step);
                            });
                        }
                    }
                }
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
                    for (int column = 0; column < kColumns; ++column) {
                        sums[row][column] += Add::wide(parts[row][column], plane);
                    }
                }
            }
        }
    }
}

// Bytes of packed int8 inputs of a group of features of `rows` rows.
template <int kBits>
std::int64_t input_group_bytes(const LowBitJob& job, std::int64_t rows) {
    return 4 * rows * (1 + kGroupUnits / job.span_units + kGroupUnits * unit_words<kBits>);
}

// Adds units [begin, end) to tile[row][output]; unit 0 sets it. A group begins at `begin`. `place` has the lines of
// unit `begin`, `packed` the input of the block.
template <Codes kCodes, int kBits, int kRows, int kPanels, class Fetch>
WINDLASS_INLINE void add_bytes_to_tile(const LowBitJob& job, const TilePlace<kPanels>& place, const char* packed,
                                       std::int64_t begin, std::int64_t end, Fetch& fetch, float* tile) {
    constexpr int kColumns = kPanels * kVectors;
    constexpr bool kExact = std::is_same_v<typename ByteSum<kBits>::Sum, I>;
    constexpr int kTop = kExact ? plane_power<kCodes>(planes_of<kCodes, kRows>() - 1) : 0;
    constexpr int kUnits = kExact && kPanels >= 4 && kRows <= 4 ? kGroupUnits : 0;
    if (begin == 0) std::memset(tile, 0, 4 * kRows * kPanels * kPanel);
    packed += begin / kGroupUnits * input_group_bytes<kBits>(job, kRows);
    const bool has_zeros = job.zeros != nullptr, has_scales = job.group_scales != nullptr;
    const float* scales = nullptr;
    for (std::int64_t at = begin, span = begin / job.span_units; at < end; at += job.span_units, ++span) {
        if (at % kGroupUnits == 0) {
            scales = reinterpret_cast<const float*>(packed);
            packed += 4 * kRows;
        }
        const auto* firsts = reinterpret_cast<const std::int32_t*>(packed);
        const std::int64_t stop = at + job.span_units < end ? at + job.span_units : end;
        I sums[kRows][kColumns];
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            const I first = I{} + (has_zeros ? 0 : firsts[row] * (1 << kTop));
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) sums[row][column] = first;
        }
        fetch.span(place, span);
        TilePlace<kPanels> here = place;
#pragma GCC unroll 16
        for (int i = 0; i < kPanels; ++i) here.lines[i] -= begin * kStepBytes * windlass::lines_of(kCodes);
        const auto* words = reinterpret_cast<const std::uint32_t*>(packed) + kRows;
        bool done = false;
        if constexpr (kUnits > 0) {
            if (stop - at == kUnits) {
                add_byte_units<kCodes, kBits, kRows, kPanels, kUnits>(here, at, stop, words, fetch, sums);
                done = true;
            }
        }
        if (!done) add_byte_units<kCodes, kBits, kRows, kPanels, 0>(here, at, stop, words, fetch, sums);
        const auto finish = [&](auto scaled, auto zeroed) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                const int i = column / kVectors;
                const std::int64_t entry = span * kPanel + column % kVectors * kLanes;
                F weight_scale = {}, zero = {};
                if constexpr (scaled) weight_scale = widen_scales(place.scales[i] + entry);
                if constexpr (zeroed) zero = widen_zeros(place.zeros[i] + entry);
#pragma GCC unroll 16
                for (int row = 0; row < kRows; ++row) {
                    F sum = __builtin_convertvector(sums[row][column], F);  // exact, as is the next line
                    if constexpr (zeroed) sum = sum - zero * all(static_cast<float>(firsts[row]));
                    if constexpr (scaled) sum = sum * weight_scale;
                    float* total = tile + (row * kColumns + column) * kLanes;
                    store(total, multiply_add(sum, all(scales[row]), load<F>(total)));
                }
            }
        };
        if (has_scales) {
            has_zeros ? finish(std::true_type{}, std::true_type{}) : finish(std::true_type{}, std::false_type{});
        } else {
            has_zeros ? finish(std::false_type{}, std::true_type{}) : finish(std::false_type{}, std::false_type{});
        }
        packed += 4 * kRows * (1 + (stop - at) * unit_words<kBits>);
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
// above them. This takes fewer operations than a conversion.
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

// Loads the offsets that are subtracted from a span's floats, whose lowest bits are the code.
template <int kPanels>
WINDLASS_INLINE void load_offsets(const LowBitJob& job, const TilePlace<kPanels>& place, std::int64_t span, float magic,
                                  F (&offsets)[kPanels * kVectors]) {
#pragma GCC unroll 16
    for (int column = 0; column < kPanels * kVectors; ++column) {
        const std::int64_t at = span * kPanel + column % kVectors * kLanes;
        offsets[column] = job.zeros == nullptr ? all(magic + static_cast<float>(job.zero))
                                               : all(magic) + widen_zeros(place.zeros[column / kVectors] + at);
    }
}

// Loads the shifts of a span's floats; 0 if there are none.
template <int kPanels>
WINDLASS_INLINE void load_shifts(const TilePlace<kPanels>& place, std::int64_t span, F (&shifts)[kPanels * kVectors]) {
#pragma GCC unroll 16
    for (int column = 0; column < kPanels * kVectors; ++column) {
        const float* from = place.shifts[column / kVectors];
        shifts[column] = from == nullptr ? F{} : load<F>(from + span * kPanel + column % kVectors * kLanes);
    }
}

template <Codes kCodes>
constexpr float magic_of() {
    return kCodes == Codes::float8 ? 0.0f : 8388608.0f;
}

// Adds the sums of a span, times its scales, to the tile.
template <int kRows, int kPanels>
WINDLASS_INLINE void add_span(const TilePlace<kPanels>& place, std::int64_t span,
                              const F (&sums)[kRows][kPanels * kVectors], float* tile) {
    constexpr int kColumns = kPanels * kVectors;
#pragma GCC unroll 16
    for (int column = 0; column < kColumns; ++column) {
        const int i = column / kVectors;
        const std::int64_t at = span * kPanel + column % kVectors * kLanes;
        const F scale = place.wide_scales[i] != nullptr ? load<F>(place.wide_scales[i] + at)
                        : place.scales[i] != nullptr    ? widen_scales(place.scales[i] + at)
                                                        : all(1.0f);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            float* total = tile + (row * kColumns + column) * kLanes;
            store(total, multiply_add(sums[row][column], scale, load<F>(total)));
        }
    }
}

// Calls `use` with the codes as a type.
template <class Use>
WINDLASS_INLINE void with_codes(Codes codes, const Use& use) {
    switch (codes) {
        case Codes::one:
            return use(std::integral_constant<Codes, Codes::one>{});
        case Codes::two:
            return use(std::integral_constant<Codes, Codes::two>{});
        case Codes::three:
            return use(std::integral_constant<Codes, Codes::three>{});
        case Codes::four:
            return use(std::integral_constant<Codes, Codes::four>{});
        case Codes::eight:
            return use(std::integral_constant<Codes, Codes::eight>{});
        case Codes::float8:
            return use(std::integral_constant<Codes, Codes::float8>{});
        case Codes::halves:  // no weight has them
            return;
    }
}

// Calls `use` with the padded number of few rows as a type.
template <class Use>
WINDLASS_INLINE void with_rows(std::int64_t rows, const Use& use) {
    switch (rows) {
        case 1:
            return use(std::integral_constant<int, 1>{});
        case 2:
            return use(std::integral_constant<int, 2>{});
        case 4:
            return use(std::integral_constant<int, 4>{});
        case 8:
            return use(std::integral_constant<int, 8>{});
        case 12:
            return use(std::integral_constant<int, 12>{});
    }
}

}  // namespace
