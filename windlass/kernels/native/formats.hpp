// Between memory and fp32 vectors: bf16, fp16, and states coded in 8 bits with one scale for each block.
//
// 8-bit codes are small floats under a scale that puts the block's largest magnitude at 1.875, the largest code:
//   signed:   sign, 4 bits of exponent, 3 of mantissa; values 2^-15 to 1.875, and 0
//   unsigned: 5 bits of exponent, 3 of mantissa; values 2^-31 to 1.875, and 0, which only 0 itself becomes
// Rounding of narrow states is stochastic: a moving average whose beta is near 1 moves by less than half a code a step,
// so that rounding to nearest would stop it. The noise is a hash of the element's own parameter, gradient and step:
// it does not depend on the place of the element or on how work is split. windlass/kernels/reference says the same in
// PyTorch.
#pragma once

#include "job.hpp"
#include "vec.hpp"

namespace {

using windlass::Format;
using windlass::kBlock;

constexpr std::uint32_t kNoiseBits = 20;  // as many as a code drops of fp32's mantissa
constexpr std::uint32_t kNoiseMask = (1u << kNoiseBits) - 1;
constexpr std::int32_t kSignedBase = 112 << 3, kUnsignedBase = 96 << 3;
constexpr float kLargestCode = 1.875f;
constexpr float kSmallestSigned = 0x1.2p-15f;   // the value of code 1
constexpr std::int32_t kLeastScaled = 0x01000000;  // bits of 2^-125: smaller magnitudes are scaled as if they were this

inline F widen_bf16(Half a) { return (F)(widen_bits(a) << 16); }

inline Half narrow_bf16(F a) {
    const U bits = (U)a;
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return low_half(select(a != a, all_bits(0x7fc0u), rounded));
}

// A hash of 32 bits; state k takes 20 of them.
inline U noise(F parameter, F gradient, std::uint32_t seed) {
    // One NaN for all: which bits of a NaN survive is the processor's choice.
    const U bits = select(parameter != parameter, all_bits(0x7fc00000u), (U)parameter);
    U hash = (bits * 0x9e3779b1u) ^ ((U)gradient + seed);
    hash = (hash ^ (hash >> 15)) * 0x85ebca77u;
    hash = (hash ^ (hash >> 13)) * 0xc2b2ae3du;
    return hash ^ (hash >> 16);
}

inline U noise_of_state(U hash, int state) {
    return (state == 0 ? hash : hash >> (state == 1 ? 12 : 6)) & kNoiseMask;
}

inline Half round_stochastically_bf16(F a, U noise) {
    const U rounded = ((U)a + (noise >> 4)) >> 16;
    return low_half(select(a != a, all_bits(0x7fc0u), rounded));
}

template <bool kSigned>
inline F decode(Byte code, F scale) {
    const U bits = widen_bits(code);
    const U magnitude = kSigned ? bits & 127u : bits;
    U value = (magnitude + (kSigned ? kSignedBase : kUnsignedBase)) << kNoiseBits;
    value = select(magnitude == 0u, U{}, value);
    if constexpr (kSigned) value |= (bits >> 7) << 31;
    return (F)value * scale;
}

// `inverse` scales the block's largest magnitude to kLargestCode.
template <bool kSigned>
inline Byte encode(F a, F inverse, U noise) {
    const U sign = (U)a & 0x80000000u;
    const F size = (F)((U)a ^ sign) * inverse;
    const I code = (I)(((U)size + noise) >> kNoiseBits) - (kSigned ? kSignedBase : kUnsignedBase);
    if constexpr (kSigned) {
        const F threshold = __builtin_convertvector((I)noise, F) * (0x1p-20f * kSmallestSigned);
        const I below = size > threshold ? I{} + 1 : I{};
        const I inside = least(code, I{} + 127);
        const U chosen = (U)select(size < kSmallestSigned, below, inside);
        return low_byte(chosen | (sign >> 24));
    } else {
        const I lowest = a != 0.0f ? I{} + 1 : I{};
        return low_byte((U)most(least(code, I{} + 255), lowest));
    }
}

// The largest magnitude of a block; compared as integers, so that a NaN or an infinity wins. Four maxima at a time,
// since each has to wait for the one before.
inline float largest(const float* values) {
    constexpr int ways = 4;
    I tops[ways] = {I{} + kLeastScaled, I{} + kLeastScaled, I{} + kLeastScaled, I{} + kLeastScaled};
    for (std::int64_t i = 0; i < kBlock; i += ways * kLanes) {
        for (int way = 0; way < ways; ++way) {
            tops[way] = most(tops[way], load<I>(values + i + way * kLanes) & 0x7fffffff);
        }
    }
    const I together = most(most(tops[0], tops[1]), most(tops[2], tops[3]));
    std::int32_t top = kLeastScaled;
    for (int lane = 0; lane < kLanes; ++lane) top = together[lane] > top ? together[lane] : top;
    return __builtin_bit_cast(float, top);
}

inline void widen(Format format, const void* from, float* to) {
    const auto* halves = static_cast<const std::uint16_t*>(from);
    if (format == Format::bf16) {
        for (std::int64_t i = 0; i < kBlock; i += kLanes) store(to + i, widen_bf16(load<Half>(halves + i)));
    } else {
        for (std::int64_t i = 0; i < kBlock; i += kLanes) store(to + i, widen_fp16(load<Half>(halves + i)));
    }
}

template <Format kFormat, bool kPastCache>
inline void narrow_to(const float* from, std::uint16_t* to) {
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
        const F value = load<F>(from + i);
        const Half half = kFormat == Format::bf16 ? narrow_bf16(value) : narrow_fp16(value);
        if constexpr (kPastCache) {
            stream(to + i, half);
        } else {
            store(to + i, half);
        }
    }
}

// With `past_cache` the result is not read again soon: it is written without being fetched first.
inline void narrow(Format format, const float* from, void* to, bool past_cache) {
    auto* halves = static_cast<std::uint16_t*>(to);
    past_cache = past_cache && reinterpret_cast<std::uintptr_t>(to) % sizeof(Half) == 0;
    if (format == Format::bf16) {
        return past_cache ? narrow_to<Format::bf16, true>(from, halves) : narrow_to<Format::bf16, false>(from, halves);
    }
    return past_cache ? narrow_to<Format::fp16, true>(from, halves) : narrow_to<Format::fp16, false>(from, halves);
}

}  // namespace
