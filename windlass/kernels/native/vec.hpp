// The widest vectors of the instruction set that a file is compiled for. Compiler vectors provide arithmetic,
// comparison and selection; only the missing operations are written for each set. All names are local to the file that
// includes this one, so that the linker cannot merge code of different sets.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// For functions in the loop over a block, where a call would cost more than the work.
#define WINDLASS_INLINE inline __attribute__((always_inline))

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
// Pairs of vectors, and groups of four.
typedef std::uint16_t Halves __attribute__((vector_size(4 * kLanes)));
typedef std::int16_t SignedHalves __attribute__((vector_size(4 * kLanes)));
typedef std::uint8_t Bytes __attribute__((vector_size(4 * kLanes)));

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

// Returns a sum that is computed here. GCC moves additions of integers behind all products of an unrolled loop: the
// products then need far more registers than there are.
template <class V>
WINDLASS_INLINE V computed_here(V sum) {
#if defined(__AVX2__)
    asm("" : "+v"(sum));
#endif
    return sum;
}

inline F all(float value) { return value - F{}; }  // not a sum, which turns -0 into 0
inline U all_bits(std::uint32_t value) { return U{} + value; }
inline F select(I mask, F yes, F no) { return mask ? yes : no; }
inline U select(I mask, U yes, U no) { return mask ? yes : no; }
inline Halves select(SignedHalves mask, Halves yes, Halves no) { return mask ? yes : no; }
inline Halves all_halves(std::uint16_t value) { return Halves{} + value; }

#if !defined(__AVX2__)

inline Halves most(Halves a, Halves b) { return select(a > b, a, b); }
inline Halves least(Halves a, Halves b) { return select(a < b, a, b); }

inline std::uint16_t least_of(Halves a) {
    std::uint16_t least = a[0];
    for (int lane = 1; lane < 2 * kLanes; ++lane) least = a[lane] < least ? a[lane] : least;
    return least;
}

// Selects `some` where any of `bits` is set.
inline Halves where_bits(Halves tested, std::uint16_t bits, Halves some, Halves none) {
    return select((tested & bits) == 0, none, some);
}

// Test that no value so far is NaN.
struct Numbers {
    I found = ~I{};
    void take(F a, F b) { found &= (a == a) & (b == b); }
    bool all_are() const {
        std::int32_t both = -1;
        for (int lane = 0; lane < kLanes; ++lane) both &= found[lane];
        return both != 0;
    }
};

inline U widen_bits(Half a) { return __builtin_convertvector(a, U); }
inline Half low_half(U a) { return __builtin_convertvector(a, Half); }

// The upper 16 bits of each lane of two vectors, and the reverse, with zeros below.
inline Halves upper_halves(U a, U b) {
    const Half halves[2] = {low_half(a >> 16), low_half(b >> 16)};
    return load<Halves>(halves);
}

inline void widen_upper(Halves halves, U& a, U& b) {
    Half parts[2];
    store(parts, halves);
    a = widen_bits(parts[0]) << 16;
    b = widen_bits(parts[1]) << 16;
}

inline Halves load_bytes(const std::uint8_t* from) {
    typedef std::uint8_t Narrow __attribute__((vector_size(2 * kLanes)));
    return __builtin_convertvector(load<Narrow>(from), Halves);
}

inline Bytes low_bytes(Halves a, Halves b) {
    typedef std::uint8_t Narrow __attribute__((vector_size(2 * kLanes)));
    const Narrow bytes[2] = {__builtin_convertvector(a, Narrow), __builtin_convertvector(b, Narrow)};
    return load<Bytes>(bytes);
}

#endif

#if defined(__AVX512F__)

inline F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline F root(F a) { return (F)_mm512_maskz_sqrt_ps(0xffff, (__m512)a); }
inline F widen_fp16(Half a) { return (F)_mm512_cvtph_ps((__m256i)a); }
inline Half narrow_fp16(F a) { return (Half)_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void stream(void* to, Half a) { _mm256_stream_si256((__m256i*)to, (__m256i)a); }

inline Halves where_bits(Halves tested, std::uint16_t bits, Halves some, Halves none) {
    const __mmask32 set = _mm512_test_epi16_mask((__m512i)tested, _mm512_set1_epi16(static_cast<short>(bits)));
    return (Halves)_mm512_mask_blend_epi16(set, (__m512i)none, (__m512i)some);
}

struct Numbers {
    __mmask16 found = 0xffff;
    void take(F a, F b) { found = _mm512_mask_cmp_ps_mask(found, (__m512)a, (__m512)b, _CMP_ORD_Q); }
    bool all_are() const { return found == 0xffff; }
};

inline void stream(void* to, Halves a) { _mm512_stream_si512((__m512i*)to, (__m512i)a); }
inline Halves most(Halves a, Halves b) { return (Halves)_mm512_max_epu16((__m512i)a, (__m512i)b); }
inline Halves least(Halves a, Halves b) { return (Halves)_mm512_min_epu16((__m512i)a, (__m512i)b); }

inline std::uint16_t least_of(Halves a) {
    const __m512i all = (__m512i)a;
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i eight = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return static_cast<std::uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(eight)));
}

template <class Number>
inline __m512i numbered(Number number) {
    Halves numbers;
    for (int lane = 0; lane < 2 * kLanes; ++lane) numbers[lane] = static_cast<std::uint16_t>(number(lane));
    return (__m512i)numbers;
}

inline Halves upper_halves(U a, U b) {
    const __m512i odd = numbered([](int lane) { return 2 * lane + 1; });
    return (Halves)_mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b);
}

inline void widen_upper(Halves halves, U& a, U& b) {
    const __m512i first = numbered([](int lane) { return lane / 2; });
    const __m512i second = numbered([](int lane) { return kLanes + lane / 2; });
    a = (U)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, first, (__m512i)halves);
    b = (U)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, second, (__m512i)halves);
}

inline Halves load_bytes(const std::uint8_t* from) {
    return (Halves)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
}

inline Bytes low_bytes(Halves a, Halves b) {
    const __m512i packed = _mm512_packus_epi16((__m512i)a, (__m512i)b);
    return (Bytes)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

inline void fence() { _mm_sfence(); }

#elif defined(__AVX2__)

inline F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline F root(F a) { return (F)_mm256_sqrt_ps((__m256)a); }
inline F widen_fp16(Half a) { return (F)_mm256_cvtph_ps((__m128i)a); }
inline Half narrow_fp16(F a) { return (Half)_mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Halves where_bits(Halves tested, std::uint16_t bits, Halves some, Halves none) {
    return select((tested & bits) == 0, none, some);
}

struct Numbers {
    __m256 found = (__m256)~I{};
    void take(F a, F b) { found = _mm256_and_ps(found, _mm256_cmp_ps((__m256)a, (__m256)b, _CMP_ORD_Q)); }
    bool all_are() const { return _mm256_movemask_ps(found) == 0xff; }
};

inline void stream(void* to, Halves a) { _mm256_stream_si256((__m256i*)to, (__m256i)a); }
inline Halves most(Halves a, Halves b) { return (Halves)_mm256_max_epu16((__m256i)a, (__m256i)b); }
inline Halves least(Halves a, Halves b) { return (Halves)_mm256_min_epu16((__m256i)a, (__m256i)b); }

inline std::uint16_t least_of(Halves a) {
    const __m256i all = (__m256i)a;
    const __m128i eight = _mm_min_epu16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    return static_cast<std::uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(eight)));
}

inline Halves upper_halves(U a, U b) {
    const __m256i packed = _mm256_packus_epi32((__m256i)(a >> 16), (__m256i)(b >> 16));
    return (Halves)_mm256_permute4x64_epi64(packed, 0xd8);
}

inline void widen_upper(Halves halves, U& a, U& b) {
    const __m256i swapped = _mm256_permute4x64_epi64((__m256i)halves, 0xd8), none = _mm256_setzero_si256();
    a = (U)_mm256_unpacklo_epi16(none, swapped);
    b = (U)_mm256_unpackhi_epi16(none, swapped);
}

inline Halves load_bytes(const std::uint8_t* from) {
    return (Halves)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
}

// The halves contain bytes, so nothing is truncated.
inline Bytes low_bytes(Halves a, Halves b) {
    return (Bytes)_mm256_permute4x64_epi64(_mm256_packus_epi16((__m256i)a, (__m256i)b), 0xd8);
}

inline void fence() { _mm_sfence(); }

#elif defined(__aarch64__)

inline F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline F root(F a) { return (F)vsqrtq_f32((float32x4_t)a); }
inline F widen_fp16(Half a) { return (F)vcvt_f32_f16((float16x4_t)a); }
inline Half narrow_fp16(F a) { return (Half)vcvt_f16_f32((float32x4_t)a); }
inline void stream(void* to, Halves a) { store(to, a); }
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

inline void stream(void* to, Halves a) { store(to, a); }
inline void fence() {}

#endif

}  // namespace
