// One pass of a rule over memory. If all tensors are fp32, it runs on long spans of the caller's memory. Otherwise it
// reads one block at a time in any formats, updates it and writes it back in the narrow formats, so main memory is read
// and written once.
#pragma once

#include "formats.hpp"
#include "rules.hpp"

namespace {

using windlass::kMostStates;
using windlass::Piece;

template <class T>
inline T* pointer(std::uint64_t address, std::int64_t bytes = 0) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address) + bytes);
}

// `count` is a multiple of kLanes.
template <bool kDivide, class Rule>
inline void sweep_divided(const Rule& rule, float divisor, float* __restrict parameter,
                          const float* __restrict gradient, float* const* state, std::int64_t count) {
    float *__restrict a = state[0], *__restrict b = state[1], *__restrict c = state[2];
    for (std::int64_t i = 0; i < count; i += kLanes) {
        F slope = load<F>(gradient + i);
        if constexpr (kDivide) slope = slope / all(divisor);
        F own[kMostStates + 1];
        if constexpr (Rule::kStates > 0) own[0] = load<F>(a + i);
        if constexpr (Rule::kStates > 1) own[1] = load<F>(b + i);
        if constexpr (Rule::kStates > 2) own[2] = load<F>(c + i);
        const F renewed = rule(load<F>(parameter + i), slope, own);
        if constexpr (Rule::kStates > 0) store(a + i, own[0]);
        if constexpr (Rule::kStates > 1) store(b + i, own[1]);
        if constexpr (Rule::kStates > 2) store(c + i, own[2]);
        store(parameter + i, renewed);
    }
}

template <class Rule>
inline void sweep(const Rule& rule, float divisor, float* parameter, const float* gradient, float* const* state,
                  std::int64_t count) {
    if (divisor == 1.0f) {
        sweep_divided<false>(rule, divisor, parameter, gradient, state, count);
    } else {
        sweep_divided<true>(rule, divisor, parameter, gradient, state, count);
    }
}

// Start addresses of the blocks of one piece, in the formats of its job.
struct Place {
    char *parameter, *gradient, *lowered;
    char* state[kMostStates];
    float* scale[kMostStates];

    Place(const Job& job, const Piece& piece, std::int64_t begin)
        : parameter(pointer<char>(piece.parameter, begin * width(job.parameter))),
          gradient(pointer<char>(piece.gradient, begin * width(job.gradient))),
          lowered(pointer<char>(piece.lowered, begin * width(job.lowered))) {
        for (int number = 0; number < kMostStates; ++number) {
            state[number] = pointer<char>(piece.state[number], begin * width(job.state));
            scale[number] = pointer<float>(piece.scale[number], begin / kBlock * sizeof(float));
        }
    }
};

// Formats of a job: any, or common ones known at compile time, for which the loop over a block has no branches.
struct AnyFormats {
    Format parameter, gradient, lowered;
    explicit AnyFormats(const Job& job) : parameter(job.parameter), gradient(job.gradient), lowered(job.lowered) {}
};

template <Format kGradient, Format kLowered>
struct KnownFormats {
    static constexpr Format parameter = Format::fp32, gradient = kGradient, lowered = kLowered;
    explicit KnownFormats(const Job&) {}

    static bool fit(const Job& job) {
        return job.parameter == parameter && job.gradient == gradient && job.lowered == lowered;
    }
};

// Prefetches the data at `at` of a later block: a block takes too long for the hardware prefetcher to look beyond it.
WINDLASS_INLINE void prefetch(Format format, const char* from, std::int64_t at) {
    constexpr std::int64_t line = 64, ahead = 3 * kBlock;
    const std::int64_t bytes = width(format);
    if (at * bytes % line != 0) return;
    for (std::int64_t byte = 0; byte < kPair * bytes; byte += line) {
        __builtin_prefetch(from + (at + ahead) * bytes + byte);
    }
}

template <class Rule, Format kState, int kNumber>
WINDLASS_INLINE void load_state(const Place& block, const float* scale, std::int64_t at, F* a, F* b) {
    if constexpr (kNumber < Rule::kStates) {
        const char* from = block.state[kNumber];
        if constexpr (kState == Format::coded) {
            const auto* codes = reinterpret_cast<const std::uint8_t*>(from) + at;
            decode<Rule::kSigned[kNumber]>(codes, all(scale[kNumber]), a[kNumber], b[kNumber]);
        } else {
            load_pair(kState, from, at, a[kNumber], b[kNumber]);
        }
    }
}

template <class Rule, Format kState>
WINDLASS_INLINE void load_states(const Place& block, const float* scale, std::int64_t at, F* a, F* b) {
    load_state<Rule, kState, 0>(block, scale, at, a, b);
    load_state<Rule, kState, 1>(block, scale, at, a, b);
    load_state<Rule, kState, 2>(block, scale, at, a, b);
}

// Extents of a rule's states.
template <class Rule>
struct Extents {
    Extent<Rule::kSigned[0]> first;
    Extent<Rule::kSigned[1]> second;
    Extent<Rule::kSigned[2]> third;

    template <int kNumber>
    WINDLASS_INLINE auto& of() {
        if constexpr (kNumber == 0) {
            return first;
        } else if constexpr (kNumber == 1) {
            return second;
        } else {
            return third;
        }
    }
};

// Block between the pass that computes it and the pass that encodes its states.
template <class Rule>
struct Uncoded {
    alignas(64) std::uint32_t hashes[kBlock];
    alignas(64) std::uint16_t rounded[Rule::kStates + 1][kBlock];
};

template <class Rule, Format kState, int kNumber>
WINDLASS_INLINE void store_state(const Place& block, Uncoded<Rule>& uncoded, Extents<Rule>& extents, std::int64_t at,
                                 F a, F b, const U* hash) {
    if constexpr (kNumber < Rule::kStates) {
        char* to = block.state[kNumber];
        const U noise_a = noise_of_state(hash[0], kNumber), noise_b = noise_of_state(hash[1], kNumber);
        if constexpr (kState == Format::fp32) {
            store_pair(kState, to, at, a, b, false);
        } else if constexpr (kState == Format::bf16) {
            store(to + at * width(kState), round_stochastically_bf16(a, b, noise_a, noise_b));
        } else {
            store(uncoded.rounded[kNumber] + at, extents.template of<kNumber>().take(a, b, noise_a, noise_b));
        }
    }
}

template <class Rule, int kNumber>
WINDLASS_INLINE void encode_state(const Place& block, const Uncoded<Rule>& uncoded, Extents<Rule>& extents) {
    if constexpr (kNumber < Rule::kStates) {
        auto* codes = reinterpret_cast<std::uint8_t*>(block.state[kNumber]);
        encode<Rule::kSigned[kNumber]>(extents.template of<kNumber>(), uncoded.rounded[kNumber], uncoded.hashes,
                                       kNumber, codes, block.scale[kNumber]);
    }
}

template <class Rule, Format kState, class Formats>
WINDLASS_INLINE void update_block(const Rule& rule, const Formats formats, bool divides, float divisor,
                                  const Noise& noise, const Place block) {
    const bool past_cache = reinterpret_cast<std::uintptr_t>(block.lowered) % sizeof(Halves) == 0;
    Uncoded<Rule> uncoded;
    Extents<Rule> extents;
    float scale[kMostStates] = {};
    if constexpr (kState == Format::coded) {
        for (int number = 0; number < Rule::kStates; ++number) scale[number] = *block.scale[number];
    }
    for (std::int64_t at = 0; at < kBlock; at += kPair) {
        F parameter[2], gradient[2], own[2][kMostStates];
        U hash[2];
        load_pair(formats.parameter, block.parameter, at, parameter[0], parameter[1]);
        load_pair(formats.gradient, block.gradient, at, gradient[0], gradient[1]);
        load_states<Rule, kState>(block, scale, at, own[0], own[1]);
        prefetch(formats.parameter, block.parameter, at);
        prefetch(formats.gradient, block.gradient, at);
        for (int number = 0; number < Rule::kStates; ++number) prefetch(kState, block.state[number], at);
        for (int side = 0; side < 2; ++side) {
            hash[side] = noise(parameter[side], gradient[side]);
            const F slope = divides ? gradient[side] / all(divisor) : gradient[side];
            parameter[side] = rule(parameter[side], slope, own[side]);
        }
        if constexpr (kState == Format::coded) {
            store(uncoded.hashes + at, hash[0]);
            store(uncoded.hashes + at + kLanes, hash[1]);
        }
        store_state<Rule, kState, 0>(block, uncoded, extents, at, own[0][0], own[1][0], hash);
        store_state<Rule, kState, 1>(block, uncoded, extents, at, own[0][1], own[1][1], hash);
        store_state<Rule, kState, 2>(block, uncoded, extents, at, own[0][2], own[1][2], hash);
        store_pair(formats.parameter, block.parameter, at, parameter[0], parameter[1], false);
        if (formats.lowered != Format::none) {
            store_pair(formats.lowered, block.lowered, at, parameter[0], parameter[1], past_cache);
        }
    }
    if constexpr (kState == Format::coded) {
        encode_state<Rule, 0>(block, uncoded, extents);
        encode_state<Rule, 1>(block, uncoded, extents);
        encode_state<Rule, 2>(block, uncoded, extents);
    }
}

template <class Rule, Format kState, class Formats>
__attribute__((noinline)) void update_blocks(const Rule& rule, const Job& job, Place block, std::int64_t count) {
    const Formats formats(job);
    const Noise noise(job.seed);
    const Rule own = rule;  // a local copy, which no store in the loop can alias, so it stays in registers
    const float divisor = job.divisor;
    const bool divides = divisor != 1.0f;
    for (; count > 0; --count) {
        update_block<Rule, kState>(own, formats, divides, divisor, noise, block);
        block.parameter += kBlock * width(formats.parameter);
        block.gradient += kBlock * width(formats.gradient);
        block.lowered += kBlock * width(formats.lowered);
        for (int number = 0; number < Rule::kStates; ++number) {
            block.state[number] += kBlock * width(kState);
            block.scale[number] += 1;
        }
    }
}

template <class Rule, Format kState>
void update_in_formats(const Rule& rule, const Job& job, const Place& blocks, std::int64_t count) {
    using Plain = KnownFormats<Format::fp32, Format::none>;
    using Mixed = KnownFormats<Format::bf16, Format::bf16>;
    if (Mixed::fit(job)) {
        update_blocks<Rule, kState, Mixed>(rule, job, blocks, count);
    } else if (Plain::fit(job)) {
        update_blocks<Rule, kState, Plain>(rule, job, blocks, count);
    } else {
        update_blocks<Rule, kState, AnyFormats>(rule, job, blocks, count);
    }
}

// Elements of a partial block inside a full one. The elements behind its end are 0 initially, are computed with the
// rest (a rule keeps states of 0 if all inputs are 0), and are not written.
class Padded {
  public:
    Padded(const Job& job, const Place& part, int states, std::int64_t count)
        : block(part), job_(job), part_(part), states_(states), count_(count) {
        block.parameter = fill(parameter_, part.parameter, job.parameter);
        block.gradient = fill(gradient_, part.gradient, job.gradient);
        block.lowered = lowered_;
        for (int number = 0; number < states; ++number) {
            block.state[number] = fill(state_[number], part.state[number], job.state);
        }
    }

    void write_back() const {
        copy(part_.parameter, parameter_, job_.parameter);
        if (job_.lowered != Format::none) copy(part_.lowered, lowered_, job_.lowered);
        for (int number = 0; number < states_; ++number) {
            copy(part_.state[number], state_[number], job_.state);
        }
    }

    Place block;

  private:
    char* fill(char* own, const char* from, Format format) const {
        __builtin_memset(own, 0, kBlock * sizeof(float));
        copy(own, from, format);
        return own;
    }

    void copy(char* to, const char* from, Format format) const { __builtin_memcpy(to, from, count_ * width(format)); }

    const Job& job_;
    const Place& part_;
    int states_;
    std::int64_t count_;
    alignas(64) char parameter_[kBlock * sizeof(float)];
    alignas(64) char gradient_[kBlock * sizeof(float)];
    alignas(64) char lowered_[kBlock * sizeof(float)];
    alignas(64) char state_[kMostStates][kBlock * sizeof(float)];
};

template <class Rule, Format kState>
void update_in_blocks(const Rule& rule, const Job& job, const Piece& piece, std::int64_t begin, std::int64_t end) {
    const std::int64_t whole = (end - begin) / kBlock;
    update_in_formats<Rule, kState>(rule, job, Place(job, piece, begin), whole);
    begin += whole * kBlock;
    if (begin == end) return;
    const Place part(job, piece, begin);
    Padded padded(job, part, Rule::kStates, end - begin);
    update_in_formats<Rule, kState>(rule, job, padded.block, 1);
    padded.write_back();
}

template <class Rule>
void update_with(const Job& job, const Piece& piece, std::int64_t begin, std::int64_t end, float ratio) {
    const Rule rule(job, ratio);
    const bool fp32 = Rule::kStates == 0 || job.state == Format::fp32;
    if (fp32 && job.parameter == Format::fp32 && job.gradient == Format::fp32 && job.lowered == Format::none) {
        const std::int64_t bytes = begin * sizeof(float), whole = (end - begin) / kBlock * kBlock;
        float* states[kMostStates];
        for (int number = 0; number < kMostStates; ++number) {
            states[number] = pointer<float>(piece.state[number], bytes);
        }
        sweep(rule, job.divisor, pointer<float>(piece.parameter, bytes), pointer<const float>(piece.gradient, bytes),
              states, whole);
        begin += whole;
    }
    if (fp32) {
        update_in_blocks<Rule, Format::fp32>(rule, job, piece, begin, end);
    } else if (job.state == Format::bf16) {
        update_in_blocks<Rule, Format::bf16>(rule, job, piece, begin, end);
    } else {
        update_in_blocks<Rule, Format::coded>(rule, job, piece, begin, end);
    }
    fence();
}

// Sum of squares in double, with sixteen partial sums for any vector width, so that all instruction sets add in the
// same order.
inline double square_sum(const float* values, std::int64_t count) {
    double parts[16] = {};
    for (std::int64_t i = 0; i < count; ++i) parts[i % 16] += static_cast<double>(values[i]) * values[i];
    double sum = 0;
    for (double part : parts) sum += part;
    return sum;
}

// Sums of the squares of parameter and update over the first `count` elements of a block.
template <Format kState>
inline void norms_of_block(const Lamb& rule, const Job& job, const Place& block, std::int64_t count, double* sums) {
    alignas(64) float parameters[kBlock];
    alignas(64) float updates[kBlock];
    const float* const* from = block.scale;
    const bool coded = kState == Format::coded;
    const float scale[Lamb::kStates] = {coded ? *from[0] : 0.0f, coded ? *from[1] : 0.0f};
    for (std::int64_t at = 0; at < kBlock; at += kPair) {
        F parameter[2], gradient[2], own[2][Lamb::kStates];
        load_pair(job.parameter, block.parameter, at, parameter[0], parameter[1]);
        load_pair(job.gradient, block.gradient, at, gradient[0], gradient[1]);
        load_states<Lamb, kState>(block, scale, at, own[0], own[1]);
        for (int side = 0; side < 2; ++side) {
            const F slope = job.divisor == 1.0f ? gradient[side] : gradient[side] / all(job.divisor);
            store(parameters + at + side * kLanes, parameter[side]);
            store(updates + at + side * kLanes, rule.direction(parameter[side], slope, own[side]));
        }
    }
    sums[0] = square_sum(parameters, count);
    sums[1] = square_sum(updates, count);
}

template <Format kState>
void norms_of_blocks(const Job& job, const Piece& piece, std::int64_t begin, std::int64_t end, double* sums) {
    const Lamb rule(job, 1.0f);
    std::int64_t at = begin;
    for (; at + kBlock <= end; at += kBlock) {
        norms_of_block<kState>(rule, job, Place(job, piece, at), kBlock, sums + 2 * (at / kBlock));
    }
    if (at == end) return;
    const Place part(job, piece, at);
    const Padded padded(job, part, Lamb::kStates, end - at);
    norms_of_block<kState>(rule, job, padded.block, end - at, sums + 2 * (at / kBlock));
}

}  // namespace
