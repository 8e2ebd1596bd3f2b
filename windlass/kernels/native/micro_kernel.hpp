// Sizes of micro-kernels, and the arithmetic that products and attention share.
#pragma once

#include "inference_job.hpp"
#include "vec.hpp"

namespace {

using windlass::kPanel;

constexpr int kVectors = kPanel / kLanes;  // vectors of a panel

// Sizes of micro-kernels: rows, and panels beside each other for at most that many rows. All accumulators stay in
// registers; few rows take several panels, so that additions to one accumulator do not wait for each other and memory
// is read in several streams, which is faster than in one. `parts` above 1: weights are widened, in registers too.
#if defined(__AVX512F__)
constexpr int kMostRows = 12;
constexpr int panels_for(int rows, int parts) {
    return rows == 1 ? 8 : rows <= 4 ? 4 : rows <= 8 && parts == 1 ? 3 : 2;
}
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kMostRows = 6;
constexpr int panels_for(int rows, int) { return rows <= 2 ? 2 : 1; }
#else
constexpr int kMostRows = 2;
constexpr int panels_for(int, int) { return 1; }
#endif

#if defined(__FMA__) || defined(__aarch64__)
WINDLASS_INLINE F multiply_add(F a, F b, F c) { return fma(a, b, c); }
#else
WINDLASS_INLINE F multiply_add(F a, F b, F c) { return a * b + c; }
#endif

// Rows of the smallest micro-kernel that has room for `rows`.
constexpr std::int64_t padded_rows(std::int64_t rows) {
    return rows <= 2 ? rows : rows <= 4 ? 4 : rows <= 6 ? 6 : rows <= 8 ? 8 : 12;
}

inline std::uint16_t bf16_of(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    if (value != value) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float_of(std::uint16_t bits) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16); }

// exp(x) to about 2 units in the last place, by the polynomial of Cephes' expf. 0 below -87.3, infinity above 88.7.
WINDLASS_INLINE F exponential(F x) {
    const F clamped = select((I)(x < all(-87.33f)), all(-87.33f), select((I)(x > all(89.0f)), all(89.0f), x));
    const F shifted = multiply_add(clamped, all(1.44269504f), all(12582912.0f));  // 1.5 * 2^23: rounds to an integer
    const F n = shifted - all(12582912.0f);
    const F r = multiply_add(n, all(2.12194440e-4f), multiply_add(n, all(-0.693359375f), clamped));
    F p = all(1.9875691500e-4f);
    p = multiply_add(p, r, all(1.3981999507e-3f));
    p = multiply_add(p, r, all(8.3334519073e-3f));
    p = multiply_add(p, r, all(4.1665795894e-2f));
    p = multiply_add(p, r, all(1.6666665459e-1f));
    p = multiply_add(p, r, all(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + all(1.0f);
    const F power = (F)(((U)shifted + 127u) << 23);  // the integer stands in the lowest bits; 128 gives infinity
    return select((I)(x < all(-87.33f)), F{}, p * power);
}

// tanh(x): a polynomial near 0, where the formula with exp would cancel.
WINDLASS_INLINE F hyperbolic_tangent(F x) {
    const F size = (F)((U)x & 0x7fffffffu), square = x * x;
    F p = all(-5.70498872745e-3f);  // Cephes' tanhf, for |x| < 0.625
    p = multiply_add(p, square, all(2.06390887954e-2f));
    p = multiply_add(p, square, all(-5.37397155531e-2f));
    p = multiply_add(p, square, all(1.33314422036e-1f));
    p = multiply_add(p, square, all(-3.33332819422e-1f));
    const F near = multiply_add(p * square, x, x);
    const F far = all(1.0f) - all(2.0f) / (exponential(size + size) + all(1.0f));
    return select((I)(size < all(0.625f)), near, (F)((U)far | ((U)x & 0x80000000u)));
}

}  // namespace
