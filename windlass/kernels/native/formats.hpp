// Conversions between memory and pairs of fp32 vectors: bf16, fp16, and 8-bit states with one scale per block.
//
// 8-bit codes are small floats under a scale, the power of two that puts the block's largest magnitude at 1 to 1.875:
//   signed:   sign, 4 bits of exponent, 3 of mantissa; values 2^-15 to 1.875, and 0
//   unsigned: 5 bits of exponent, 3 of mantissa; values 2^-31 to 1.875, and 0
// So a code consists of bits of the rounded fp32 number, and encoding a decoded value gives the same code with any
// noise. Rounding of narrow states is stochastic: a moving average whose beta is near 1 moves by less than half a code
// a step, so that rounding to nearest would stop it. The noise is a hash of the element's own parameter, gradient and
// step: it does not depend on the position of the element or on how work is split. windlass/kernels/reference is the
// reference in PyTorch.
#pragma once

#include "job.hpp"
#include "vec.hpp"

namespace {

using windlass::Format;
using windlass::kBlock;

constexpr int kPair = 2 * kLanes;
constexpr std::uint32_t kNoiseBits = 20;  // the number of mantissa bits of fp32 that a code drops
constexpr std::uint32_t kNoiseMask = (1u << kNoiseBits) - 1;
constexpr std::uint32_t kSecondNoise = 0x9e3779b1u;
constexpr float kSmallestSigned = 0x1.2p-15f;  // the value of code 1

// Number of biased fp32 exponents that the codes span below that of the scale; and the exponent of the smallest scale,
// with which code 1 and, for signed codes, its product with a noise are normal numbers.
template <bool kSigned>
constexpr int kSpan = kSigned ? 15 : 31;
template <bool kSigned>
constexpr int kLeastScale = kSigned ? 64 : 32;

WINDLASS_INLINE Halves narrow_bf16(F a, F b) {
    const auto rounded = [](F value) {
        const U bits = (U)value;
        return select(value != value, all_bits(0x7fc00000u), bits + 0x7fffu + ((bits >> 16) & 1u));
    };
    return upper_halves(rounded(a), rounded(b));
}

inline std::uint32_t scrambled(std::uint32_t bits) {
    bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
    bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
    return bits ^ (bits >> 16);
}

// Hash of 32 bits; each state uses 20 of them. The part that differs between steps is derived from the seed once. The
// hash uses the old parameter, because the new one is computed last.
struct Noise {
    std::uint32_t first, second, added;

    explicit Noise(std::uint32_t seed)
        : first(scrambled(3 * seed) | 1u), second(scrambled(3 * seed + 1) | 1u), added(scrambled(3 * seed + 2)) {}

    WINDLASS_INLINE U operator()(F parameter, F gradient) const {
        // A NaN counts as 0, because its payload bits depend on the processor.
        const U spread = select(parameter == parameter, (U)parameter * first, U{});
        const U hash = spread ^ ((U)gradient + added);
        return (hash ^ (hash >> 15)) * second;
    }
};

WINDLASS_INLINE U noise_of_state(U hash, int state) {
    if (state == 1) return hash >> 12;
    return (state == 0 ? hash ^ (hash >> 12) : hash >> 6) & kNoiseMask;
}

WINDLASS_INLINE Halves round_stochastically_bf16(F a, F b, U noise_a, U noise_b) {
    const auto rounded = [](F value, U noise) {
        return select(value != value, all_bits(0x7fc00000u), (U)value + (noise >> 4));
    };
    return upper_halves(rounded(a, noise_a), rounded(b, noise_b));
}

template <bool kSigned>
WINDLASS_INLINE void decode(const std::uint8_t* codes, F scale, F& a, F& b) {
    const Halves bits = load_bytes(codes);
    Halves values;
    if constexpr (kSigned) {
        const Halves high = bits << 8;  // the sign is in place; a zero is complete
        const Halves spread = (Halves)((SignedHalves)high >> 4);
        values = where_bits(bits, 0x7f, (spread & 0x87f0) | 0x3800, high);
    } else {
        values = where_bits(bits, 0xff, (bits << 4) | 0x3000, bits);
    }
    U low, high;
    widen_upper(values, low, high);
    a = (F)low * scale;
    b = (F)high * scale;
}

// Extremes over all elements of a block of one state, which are needed before its first element is encoded.
template <bool kSigned>
struct Extent {
    Halves most_ = {}, least_ = all_halves(0xffff);
    Numbers numbers;

    // Returns a pair of values with noise added, in the upper halves: sign, exponent, rounded mantissa of 3 bits, and 4
    // bits to drop. Codes are computed from them.
    WINDLASS_INLINE Halves take(F a, F b, U noise_a, U noise_b) {
        numbers.take(a, b);
        const Halves rounded = upper_halves((U)a + noise_a, (U)b + noise_b);
        const Halves size = kSigned ? rounded & 0x7fff : rounded;
        most_ = most(most_, size);
        least_ = least(least_, size);
        return rounded;
    }

    // Biased exponent of the largest magnitude; 255 or more if the block has a non-finite value.
    WINDLASS_INLINE int exponent() const {
        return numbers.all_are() ? static_cast<std::uint16_t>(~least_of(~most_)) >> 7 : 255;
    }
};

// Encodes values without a magnitude below code 1. `floor` is the magnitude of code 0.
template <bool kSigned>
WINDLASS_INLINE Halves encode_inside(Halves rounded, std::uint16_t floor) {
    const Halves above = rounded - floor;
    if constexpr (kSigned) return ((above >> 4) & 0x7f) | ((rounded >> 8) & 0x80);
    return above >> 4;
}

// Encodes values of any magnitude. Signed values below code 1 are rounded again, to code 1 or 0; unsigned ones become
// code 1.
template <bool kSigned>
WINDLASS_INLINE Halves encode_any(Halves rounded, std::uint16_t floor, F smallest, U noise_a, U noise_b) {
    const Halves size = rounded & 0x7ff0;
    const Halves inside = (size - floor) >> 4;
    Halves below = select(size == 0, Halves{}, all_halves(1));
    if constexpr (kSigned) {
        const auto part = [smallest](U noise) {
            const U other = (noise * kSecondNoise) & kNoiseMask;
            return (U)(__builtin_convertvector((I)other, F) * smallest);
        };
        below = select(size > upper_halves(part(noise_a), part(noise_b)), all_halves(1), Halves{});
    }
    const Halves code = select(size < static_cast<std::uint16_t>(floor + 16), below, inside);
    return kSigned ? code | ((rounded >> 8) & 0x80) : code;
}

// Writes the codes of a block and their scale. The noise in `rounded` was made from `hashes`.
template <bool kSigned>
WINDLASS_INLINE void encode(const Extent<kSigned>& extent, const std::uint16_t* rounded, const std::uint32_t* hashes,
                            int state, std::uint8_t* codes, float* scale) {
    int exponent = extent.exponent();
    if (__builtin_expect(exponent >= 255, 0)) {
        *scale = __builtin_inff();
        __builtin_memset(codes, 0, kBlock);
        return;
    }
    if (exponent < kLeastScale<kSigned>) exponent = kLeastScale<kSigned>;
    *scale = __builtin_bit_cast(float, exponent << 23);
    const auto floor = static_cast<std::uint16_t>((exponent - kSpan<kSigned>) << 7);
    if (least_of(extent.least_) >= floor + 16) {
        for (std::int64_t i = 0; i < kBlock; i += 2 * kPair) {
            store(codes + i, low_bytes(encode_inside<kSigned>(load<Halves>(rounded + i), floor),
                                       encode_inside<kSigned>(load<Halves>(rounded + i + kPair), floor)));
        }
        return;
    }
    const F smallest = all(kSmallestSigned * 0x1p-20f * *scale);
    const auto coded = [&](std::int64_t i) {
        return encode_any<kSigned>(load<Halves>(rounded + i), floor, smallest,
                                   noise_of_state(load<U>(hashes + i), state),
                                   noise_of_state(load<U>(hashes + i + kLanes), state));
    };
    for (std::int64_t i = 0; i < kBlock; i += 2 * kPair) store(codes + i, low_bytes(coded(i), coded(i + kPair)));
}

inline std::int64_t width(Format format) { return format == Format::fp32 ? 4 : format == Format::coded ? 1 : 2; }

// Loads elements `at` to `at + kPair` of an array of any float format.
WINDLASS_INLINE void load_pair(Format format, const char* from, std::int64_t at, F& a, F& b) {
    from += at * width(format);
    if (format == Format::fp32) {
        a = load<F>(from);
        b = load<F>(from + sizeof(F));
    } else if (format == Format::bf16) {
        U low, high;
        widen_upper(load<Halves>(from), low, high);
        a = (F)low;
        b = (F)high;
    } else {
        a = widen_fp16(load<Half>(from));
        b = widen_fp16(load<Half>(from + sizeof(Half)));
    }
}

// With `past_cache` (`to` must be aligned) the result is not read again soon: it is written with non-temporal stores.
WINDLASS_INLINE void store_pair(Format format, char* to, std::int64_t at, F a, F b, bool past_cache) {
    to += at * width(format);
    if (format == Format::fp32) {
        store(to, a);
        store(to + sizeof(F), b);
        return;
    }
    Halves halves;
    if (format == Format::bf16) {
        halves = narrow_bf16(a, b);
    } else {
        const Half parts[2] = {narrow_fp16(a), narrow_fp16(b)};
        halves = load<Halves>(parts);
    }
    if (past_cache) {
        stream(to, halves);
    } else {
        store(to, halves);
    }
}

}  // namespace
