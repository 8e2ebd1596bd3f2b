// Passes over the scores of all tokens of a vocabulary, for the instruction set that the file is compiled for. Every row
// is computed in one fixed order, whatever rows are beside it.
#pragma once

#include "fused.hpp"

namespace {

using windlass::kPartTokens;

// Writes the highest score of each part of kPartTokens tokens, and returns the highest of all. No score is NaN.
float find_maxima(const float* scores, std::int64_t count, float* maxima) {
    float greatest = -__builtin_inff();
    for (std::int64_t first = 0; first < count; first += kPartTokens) {
        const std::int64_t size = count - first < kPartTokens ? count - first : kPartTokens;
        F found = all(-__builtin_inff());
        for (std::int64_t i = 0; i < size; i += kLanes) {
            F value;
            if (size - i >= kLanes) {
                value = load<F>(scores + first + i);
            } else {
                value = all(-__builtin_inff());
                for (std::int64_t lane = 0; lane < size - i; ++lane) value[lane] = scores[first + i + lane];
            }
            found = select((I)(value > found), value, found);
        }
        float most = found[0];
        for (int lane = 1; lane < kLanes; ++lane) most = found[lane] > most ? found[lane] : most;
        maxima[first / kPartTokens] = most;
        greatest = most > greatest ? most : greatest;
    }
    return greatest;
}

// Writes weights = exp((scores - greatest) / temperature), and the sum of the weights of each part.
void weigh(const float* scores, std::int64_t count, float greatest, float temperature, float* weights, float* sums) {
    for (std::int64_t first = 0; first < count; first += kPartTokens) {
        const std::int64_t size = count - first < kPartTokens ? count - first : kPartTokens;
        F lanes{};
        for (std::int64_t i = 0; i < size; i += kLanes) {
            F weight = exponential((load_row(scores, first + i, size - i, false) - all(greatest)) / all(temperature));
            for (std::int64_t lane = size - i; lane < kLanes; ++lane) weight[lane] = 0;
            store_values(weights, first + i, size - i, false, weight);
            lanes = lanes + weight;
        }
        float sum = 0;
        for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
        sums[first / kPartTokens] = sum;
    }
}

// Writes the indices of the values that are at least `least`, in ascending order; returns their number.
std::int64_t collect(const float* values, std::int64_t count, float least, std::int32_t* ids) {
    std::int64_t found = 0, i = 0;
#if defined(__AVX2__)
    for (; i + kLanes <= count; i += kLanes) {
        const F value = load<F>(values + i);
#if defined(__AVX512F__)
        unsigned set = _mm512_cmp_ps_mask((__m512)value, (__m512)all(least), _CMP_GE_OQ);
#else
        unsigned set = _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, (__m256)all(least), _CMP_GE_OQ));
#endif
        for (; set != 0; set &= set - 1) ids[found++] = static_cast<std::int32_t>(i + __builtin_ctz(set));
    }
#endif
    for (; i < count; ++i) {
        if (values[i] >= least) ids[found++] = static_cast<std::int32_t>(i);
    }
    return found;
}

}  // namespace
