// The widest vectors of the instruction set that a file is compiled for. Compiler vectors do arithmetic, comparison and
// selection; only what they lack is written for each set. All names are local to the file that includes this one, so
// that no linker can take code of one set for another.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t I __attribute__((vector_size(4 * kLanes)));
typedef std::uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t Half __attribute__((vector_size(2 * kLanes)));
typedef std::uint8_t Byte __attribute__((vector_size(kLanes)));

template <class V>
inline V load(const void* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void store(void* to, V value) {
    __builtin_memcpy(to, &value, sizeof value);
}

inline F all(float value) { return F{} + value; }
inline U all_bits(std::uint32_t value) { return U{} + value; }
inline F select(I mask, F yes, F no) { return mask ? yes : no; }
inline U select(I mask, U yes, U no) { return mask ? yes : no; }
inline I select(I mask, I yes, I no) { return mask ? yes : no; }

#if !defined(__AVX2__)

inline I most(I a, I b) { return select(a > b, a, b); }
inline I least(I a, I b) { return select(a < b, a, b); }
inline U widen_bits(Half a) { return __builtin_convertvector(a, U); }
inline U widen_bits(Byte a) { return __builtin_convertvector(a, U); }
inline Half low_half(U a) { return __builtin_convertvector(a, Half); }
inline Byte low_byte(U a) { return __builtin_convertvector(a, Byte); }

#endif

#if defined(__AVX512F__)

inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline F root(F a) { return (F)_mm512_sqrt_ps((__m512)a); }
inline F widen_fp16(Half a) { return (F)_mm512_cvtph_ps((__m256i)a); }
inline Half narrow_fp16(F a) { return (Half)_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void stream(void* to, Half a) { _mm256_stream_si256((__m256i*)to, (__m256i)a); }
inline I most(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline I least(I a, I b) { return (I)_mm512_min_epi32((__m512i)a, (__m512i)b); }
inline U widen_bits(Half a) { return (U)_mm512_cvtepu16_epi32((__m256i)a); }
inline U widen_bits(Byte a) { return (U)_mm512_cvtepu8_epi32((__m128i)a); }
inline Half low_half(U a) { return (Half)_mm512_cvtepi32_epi16((__m512i)a); }
inline Byte low_byte(U a) { return (Byte)_mm512_cvtepi32_epi8((__m512i)a); }
inline void fence() { _mm_sfence(); }

#elif defined(__AVX2__)

inline F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline F root(F a) { return (F)_mm256_sqrt_ps((__m256)a); }
inline F widen_fp16(Half a) { return (F)_mm256_cvtph_ps((__m128i)a); }
inline Half narrow_fp16(F a) { return (Half)_mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void stream(void* to, Half a) { _mm_stream_si128((__m128i*)to, (__m128i)a); }
inline I most(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline I least(I a, I b) { return (I)_mm256_min_epi32((__m256i)a, (__m256i)b); }
inline U widen_bits(Half a) { return (U)_mm256_cvtepu16_epi32((__m128i)a); }
inline U widen_bits(Byte a) { return (U)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(__builtin_bit_cast(long long, a))); }

// Both take lanes that fit: nothing is cut off.
inline Half low_half(U a) {
    const __m256i wide = (__m256i)a;
    return (Half)_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

inline Byte low_byte(U a) {
    const __m128i halves = (__m128i)low_half(a);
    return __builtin_bit_cast(Byte, _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
}

inline void fence() { _mm_sfence(); }

#elif defined(__aarch64__)

inline F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline F root(F a) { return (F)vsqrtq_f32((float32x4_t)a); }
inline F widen_fp16(Half a) { return (F)vcvt_f32_f16((float16x4_t)a); }
inline Half narrow_fp16(F a) { return (Half)vcvt_f16_f32((float32x4_t)a); }
inline void stream(void* to, Half a) { store(to, a); }
inline void fence() {}

#else

inline F fma(F a, F b, F c) {
    F out;
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return out;
}

inline F root(F a) {
    F out;
    for (int lane = 0; lane < kLanes; ++lane) out[lane] = __builtin_sqrtf(a[lane]);
    return out;
}

// Exponents are moved by multiplying with a power of two, which turns subnormal halves into normal floats exactly.
inline F widen_fp16(Half a) {
    const U bits = widen_bits(a);
    const U magnitude = (bits & 0x7fffu) << 13;
    const I is_finite = (I)magnitude < (I)all_bits(0x0f800000u);
    const F value = select(is_finite, (F)magnitude * 0x1p112f, (F)(magnitude | 0x7f800000u));
    return (F)((U)value | ((bits & 0x8000u) << 16));
}

inline Half narrow_fp16(F a) {
    const U bits = (U)a, magnitude = bits & 0x7fffffffu;
    // Normal halves: move the exponent and round the 13 lowest bits to nearest even; overflow carries into infinity.
    const U moved = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const U normal = select((I)moved > (I)all_bits(0x7c00u), all_bits(0x7c00u), moved);
    // Subnormal halves: adding 0.5 puts the unit of a half's last place at a float's last place.
    const U small = (U)((F)magnitude + all(0.5f)) - 0x3f000000u;
    U out = select((I)magnitude < (I)all_bits(0x38800000u), small, normal);
    out = select((I)magnitude >= (I)all_bits(0x477ff000u), all_bits(0x7c00u), out);
    out = select((I)magnitude > (I)all_bits(0x7f800000u), all_bits(0x7e00u), out);
    return low_half(out | ((bits >> 16) & 0x8000u));
}

inline void stream(void* to, Half a) { store(to, a); }
inline void fence() {}

#endif

}  // namespace
