// One pass of a rule over memory. Where all is fp32 it runs on the caller's memory; else a block at a time is widened
// into the first-level cache, updated there, and written back narrow: main memory is still read and written once.
#pragma once

#include "formats.hpp"
#include "rules.hpp"

namespace {

using windlass::kMostStates;
using windlass::Piece;

template <class T>
inline T* pointer(std::uint64_t address, std::int64_t elements = 0) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address)) + elements;
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

inline std::int64_t width(Format format) { return format == Format::fp32 ? 4 : format == Format::coded ? 1 : 2; }

// A block of one piece in fp32: the caller's own memory where it is that already and whole, else a copy. What lies
// behind the end of a part block is 0 at first, is computed with the rest, and is not written.
class Tile {
  public:
    Tile(const Job& job, const Piece& piece, std::int64_t begin, std::int64_t count)
        : job_(job), piece_(piece), begin_(begin), count_(count), whole_(count == kBlock) {
        gradient = view(job.gradient, piece.gradient, gradients_);
        parameter = view(job.parameter, piece.parameter, parameters_);
    }

    template <class Rule>
    void open_states() {
        if constexpr (Rule::kStates > 0) open_state<Rule::kSigned[0]>(0);
        if constexpr (Rule::kStates > 1) open_state<Rule::kSigned[1]>(1);
        if constexpr (Rule::kStates > 2) open_state<Rule::kSigned[2]>(2);
    }

    // Writes back what was renewed; nothing is left to do where the rule ran on the caller's memory.
    template <class Rule>
    void close() {
        if constexpr (Rule::kStates > 0) {
            if (job_.state == Format::bf16 || job_.state == Format::coded) {
                for (std::int64_t i = 0; i < kBlock; i += kLanes) {
                    store(noise_ + i, noise(load<F>(parameter + i), load<F>(gradient + i), job_.seed));
                }
            }
            close_state<Rule::kSigned[0]>(0);
        }
        if constexpr (Rule::kStates > 1) close_state<Rule::kSigned[1]>(1);
        if constexpr (Rule::kStates > 2) close_state<Rule::kSigned[2]>(2);
        give(job_.parameter, piece_.parameter, parameter, false);
        if (job_.lowered != Format::none) give(job_.lowered, piece_.lowered, parameter, true);
    }

    float* parameter;
    float* gradient;
    float* state[kMostStates] = {};

  private:
    float* view(Format format, std::uint64_t address, float* own) {
        const char* from = pointer<const char>(address) + begin_ * width(format);
        if (format == Format::fp32) {
            if (whole_) return pointer<float>(address, begin_);
            for (std::int64_t i = count_; i < kBlock; ++i) own[i] = 0.0f;
            __builtin_memcpy(own, from, count_ * sizeof(float));
        } else if (whole_) {
            widen(format, from, own);
        } else {
            std::uint16_t halves[kBlock] = {};
            __builtin_memcpy(halves, from, count_ * sizeof(std::uint16_t));
            widen(format, halves, own);
        }
        return own;
    }

    void give(Format format, std::uint64_t address, const float* values, bool past_cache) {
        char* to = pointer<char>(address) + begin_ * width(format);
        if (format == Format::fp32) {
            if (!whole_) __builtin_memcpy(to, values, count_ * sizeof(float));
        } else if (whole_) {
            narrow(format, values, to, past_cache);
        } else {
            std::uint16_t halves[kBlock];
            narrow(format, values, halves, false);
            __builtin_memcpy(to, halves, count_ * sizeof(std::uint16_t));
        }
    }

    template <bool kSigned>
    void open_state(int place) {
        if (job_.state != Format::coded) {
            state[place] = view(job_.state, piece_.state[place], states_[place]);
            return;
        }
        state[place] = states_[place];
        std::uint8_t part[kBlock];
        const F scale = all(pointer<const float>(piece_.scale[place])[begin_ / kBlock]);
        const std::uint8_t* codes = pointer<const std::uint8_t>(piece_.state[place], begin_);
        if (!whole_) {
            for (std::int64_t i = count_; i < kBlock; ++i) part[i] = 0;
            __builtin_memcpy(part, codes, count_);
            codes = part;
        }
        for (std::int64_t i = 0; i < kBlock; i += kLanes) {
            store(states_[place] + i, decode<kSigned>(load<Byte>(codes + i), scale));
        }
    }

    template <bool kSigned>
    void close_state(int place) {
        if (job_.state == Format::coded) {
            encode_state<kSigned>(place);
        } else if (job_.state == Format::bf16) {
            std::uint16_t part[kBlock];
            auto* out = pointer<std::uint16_t>(piece_.state[place], begin_);
            std::uint16_t* to = whole_ ? out : part;
            for (std::int64_t i = 0; i < kBlock; i += kLanes) {
                const U bits = noise_of_state(load<U>(noise_ + i), place);
                store(to + i, round_stochastically_bf16(load<F>(state[place] + i), bits));
            }
            if (!whole_) __builtin_memcpy(out, part, count_ * sizeof(std::uint16_t));
        } else {
            give(job_.state, piece_.state[place], state[place], false);
        }
    }

    template <bool kSigned>
    void encode_state(int place) {
        // What stands behind the end must neither take part in the scale nor be written.
        for (std::int64_t i = count_; i < kBlock; ++i) state[place][i] = 0.0f;
        const float top = largest(state[place]);
        const F inverse = all(kLargestCode / top);
        std::uint8_t part[kBlock];
        auto* out = pointer<std::uint8_t>(piece_.state[place], begin_);
        std::uint8_t* to = whole_ ? out : part;
        for (std::int64_t i = 0; i < kBlock; i += kLanes) {
            const U bits = noise_of_state(load<U>(noise_ + i), place);
            store(to + i, encode<kSigned>(load<F>(state[place] + i), inverse, bits));
        }
        if (!whole_) __builtin_memcpy(out, part, count_);
        pointer<float>(piece_.scale[place])[begin_ / kBlock] = top / kLargestCode;
    }

    const Job& job_;
    const Piece& piece_;
    std::int64_t begin_, count_;
    bool whole_;
    alignas(64) float gradients_[kBlock];
    alignas(64) float parameters_[kBlock];
    alignas(64) float states_[kMostStates][kBlock];
    alignas(64) std::uint32_t noise_[kBlock];
};

// Asks for what the block after the next will read: the work on a block is too long for the processor to look past it.
template <class Rule>
inline void prefetch(const Job& job, const Piece& piece, std::int64_t begin) {
    const auto fetch = [begin](Format format, std::uint64_t address) {
        const char* from = pointer<const char>(address) + begin * width(format);
        for (std::int64_t at = 0; at < kBlock * width(format); at += 64) __builtin_prefetch(from + at);
    };
    fetch(job.parameter, piece.parameter);
    fetch(job.gradient, piece.gradient);
    for (int place = 0; place < Rule::kStates; ++place) fetch(job.state, piece.state[place]);
}

template <class Rule>
inline void update_block(const Rule& rule, const Job& job, const Piece& piece, std::int64_t begin, std::int64_t count) {
    Tile tile(job, piece, begin, count);
    tile.template open_states<Rule>();
    sweep(rule, job.divisor, tile.parameter, tile.gradient, tile.state, kBlock);
    tile.template close<Rule>();
}

template <class Rule>
void update_with(const Job& job, const Piece& piece, std::int64_t begin, std::int64_t end, float ratio) {
    const Rule rule(job, ratio);
    const bool plain = job.parameter == Format::fp32 && job.gradient == Format::fp32 &&
                       job.lowered == Format::none && (Rule::kStates == 0 || job.state == Format::fp32);
    const std::int64_t whole = begin + (end - begin) / kBlock * kBlock;
    if (plain) {
        float* states[kMostStates];
        for (int place = 0; place < kMostStates; ++place) states[place] = pointer<float>(piece.state[place], begin);
        sweep(rule, job.divisor, pointer<float>(piece.parameter, begin), pointer<const float>(piece.gradient, begin),
              states, whole - begin);
    } else {
        for (std::int64_t at = begin; at < whole; at += kBlock) {
            if (at + 3 * kBlock <= whole) prefetch<Rule>(job, piece, at + 2 * kBlock);
            update_block(rule, job, piece, at, kBlock);
        }
    }
    if (whole < end) update_block(rule, job, piece, whole, end - whole);
    fence();
}

// In double and in sixteen partial sums, whatever the width of the vectors: every instruction set adds in one order.
inline double square_sum(const float* values, std::int64_t count) {
    double parts[16] = {};
    for (std::int64_t i = 0; i < count; ++i) parts[i % 16] += static_cast<double>(values[i]) * values[i];
    double sum = 0;
    for (double part : parts) sum += part;
    return sum;
}

inline void norms_of_block(const Lamb& rule, const Job& job, const Piece& piece, std::int64_t begin, std::int64_t count,
                           double* sums) {
    Tile tile(job, piece, begin, count);
    tile.open_states<Lamb>();
    alignas(64) float updates[kBlock];
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
        F slope = load<F>(tile.gradient + i);
        if (job.divisor != 1.0f) slope = slope / all(job.divisor);
        F own[2] = {load<F>(tile.state[0] + i), load<F>(tile.state[1] + i)};
        store(updates + i, rule.direction(load<F>(tile.parameter + i), slope, own));
    }
    sums[0] = square_sum(tile.parameter, count);
    sums[1] = square_sum(updates, count);
}

}  // namespace
