// Normalization, rotary embeddings and gated activations in one pass each, for the instruction set that the file is
// compiled for. Every row is computed in one fixed order, whatever rows are beside it.
#pragma once

#include <cstring>

#include "micro_kernel.hpp"

namespace {

using windlass::Activation;
using windlass::AddJob;
using windlass::GateJob;
using windlass::NormJob;
using windlass::RotaryJob;

// Loads up to kLanes elements of a float32 or bf16 array: min(count, kLanes), with zeros behind.
WINDLASS_INLINE F load_row(const void* from, std::int64_t at, std::int64_t count, bool is_bf16) {
    if (is_bf16) {
        const auto* line = static_cast<const std::uint16_t*>(from) + at;
        Half halves{};
        if (count >= kLanes) {
            halves = load<Half>(line);
        } else {
            for (std::int64_t i = 0; i < count; ++i) halves[i] = line[i];
        }
        return (F)(__builtin_convertvector(halves, U) << 16);
    }
    const auto* line = static_cast<const float*>(from) + at;
    if (count >= kLanes) return load<F>(line);
    F values{};
    for (std::int64_t i = 0; i < count; ++i) values[i] = line[i];
    return values;
}

WINDLASS_INLINE void store_values(void* to, std::int64_t at, std::int64_t count, bool is_bf16, F values) {
    if (is_bf16) {
        auto* line = static_cast<std::uint16_t*>(to) + at;
        const U bits = (U)values;
        const U rounded = select((I)(values != values), all_bits(0x7fc00000u), bits + 0x7fffu + ((bits >> 16) & 1u));
        const Half halves = __builtin_convertvector(rounded >> 16, Half);
        if (count >= kLanes) {
            store(line, halves);
        } else {
            for (std::int64_t i = 0; i < count; ++i) line[i] = halves[i];
        }
        return;
    }
    auto* line = static_cast<float*>(to) + at;
    if (count >= kLanes) {
        store(line, values);
    } else {
        for (std::int64_t i = 0; i < count; ++i) line[i] = values[i];
    }
}

void normalize_rows(const NormJob& job, std::int64_t begin, std::int64_t end) {
    const std::int64_t features = job.features;
    for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t first = row * features, at = row / job.heads * job.stride + row % job.heads * features;
        F squares[4] = {};
        for (std::int64_t i = 0; i < features; i += kLanes) {
            F value = load_row(job.x, at + i, features - i, job.is_bf16);
            if (job.residual != nullptr) {
                value = value + load_row(job.residual, first + i, features - i, job.is_bf16);
                store_values(job.residual, first + i, features - i, job.is_bf16, value);
                // A bf16 stream continues with its rounded sum, as separate operations do.
                if (job.is_bf16) value = load_row(job.residual, first + i, features - i, true);
            }
            F& sum = squares[i / kLanes % 4];
            sum = multiply_add(value, value, sum);
        }
        const F lanes = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        float total = 0;
        for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
        const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(features) + job.epsilon);
        const void* source = job.residual != nullptr ? job.residual : job.x;
        const std::int64_t from = job.residual != nullptr ? first : at;
        for (std::int64_t i = 0; i < features; i += kLanes) {
            const F value = load_row(source, from + i, features - i, job.is_bf16) * all(factor);
            const F weight = load_row(job.weight, i, features - i, false);
            store_values(job.out, first + i, features - i, job.is_bf16, value * weight);
        }
    }
}

// out = a + b, elements [begin, end) of two arrays.
void add_elements(const AddJob& job, std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kLanes) {
        const std::int64_t count = end - i < kLanes ? end - i : kLanes;
        store_values(job.out, i, count, job.is_bf16,
                     load_row(job.a, i, count, job.is_bf16) + load_row(job.b, i, count, job.is_bf16));
    }
}

void rotate_rows(const RotaryJob& job, std::int64_t begin, std::int64_t end) {
    const std::int64_t half = job.rotary_dim / 2;
    for (std::int64_t token = begin; token < end; ++token) {
        const float* cosines = job.cosines + token * job.rotary_dim;
        const float* sines = job.sines + token * job.rotary_dim;
        for (std::int64_t head = 0; head < job.heads; ++head) {
            const std::int64_t at = token * job.token_stride + head * job.head_dim;
            for (std::int64_t i = 0; i < half; i += kLanes) {
                const std::int64_t count = half - i < kLanes ? half - i : kLanes;
                const F low = load_row(job.x, at + i, count, job.is_bf16);
                const F high = load_row(job.x, at + half + i, count, job.is_bf16);
                const F new_low = low * load_row(cosines, i, count, false) - high * load_row(sines, i, count, false);
                const F new_high =
                    high * load_row(cosines, half + i, count, false) + low * load_row(sines, half + i, count, false);
                store_values(job.x, at + i, count, job.is_bf16, new_low);
                store_values(job.x, at + half + i, count, job.is_bf16, new_high);
            }
        }
    }
}

// x * sigmoid(x), or GELU by tanh.
WINDLASS_INLINE F activate(Activation activation, F x) {
    if (activation == Activation::silu) return x / (all(1.0f) + exponential(-x));
    const F inner = all(0.7978845608f) * multiply_add(all(0.044715f) * x * x, x, x);
    return all(0.5f) * x * (all(1.0f) + hyperbolic_tangent(inner));
}

void gate_rows(const GateJob& job, std::int64_t begin, std::int64_t end) {
    const std::int64_t features = job.features;
    for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t i = 0; i < features; i += kLanes) {
            const F gate = load_row(job.gate_up, row * 2 * features + i, features - i, job.is_bf16);
            const F up = load_row(job.gate_up, (row * 2 + 1) * features + i, features - i, job.is_bf16);
            store_values(job.out, row * features + i, features - i, job.is_bf16, activate(job.activation, gate) * up);
        }
    }
}

}  // namespace
