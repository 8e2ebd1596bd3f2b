// The update rules on one vector of elements. Each receives parameter and gradient, updates its states in place and
// returns the new parameter. The order of operations is that of torch's own fused CPU steps (Adam, SGD, Adagrad), of
// windlass.optim.Lion and of windlass.optim.Lamb; a multiplication and an addition are fused only by an explicit `fma`.
// windlass/kernels/update_rules.py defines the order of a job's coefficients.
#pragma once

#include "job.hpp"
#include "vec.hpp"

namespace {

using windlass::Job;

inline F number(const Job& job, int place) { return all(static_cast<float>(job.numbers[place])); }
inline bool has(const Job& job, windlass::Flag flag) { return (job.flags & flag) != 0; }

// Propagates NaN from either side, as torch.maximum does.
inline F larger(F a, F b) { return select((a > b) | (a != a), a, b); }

// Kingma & Ba, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, arXiv:1711.05101; Reddi et al., arXiv:1904.09237.
template <bool kCoupled, bool kAmsgrad>
struct Adam {
    static constexpr int kStates = kAmsgrad ? 3 : 2;
    static constexpr bool kSigned[3] = {true, false, false};
    F keep, decay, mix, beta2, rest2, correction, eps, size;
    bool towards;  // interpolate from the average, not from the gradient

    Adam(const Job& job, float)
        : keep(number(job, 0)), decay(number(job, 1)), beta2(number(job, 3)), rest2(number(job, 4)),
          correction(number(job, 5)), eps(number(job, 6)), size(number(job, 7)) {
        const auto weight = static_cast<float>(job.numbers[2]);
        towards = (weight < 0 ? -weight : weight) < 0.5f;
        mix = all(towards ? weight : weight - 1.0f);
    }

    inline F operator()(F parameter, F gradient, F* state) const {
        if constexpr (kCoupled) {
            gradient = fma(parameter, decay, gradient);
        } else {
            parameter = parameter * keep;
        }
        const F average = state[0] = fma(mix, gradient - state[0], towards ? state[0] : gradient);
        F square = state[1] = fma(rest2 * gradient, gradient, state[1] * beta2);
        if constexpr (kAmsgrad) square = state[2] = larger(state[2], square);
        return parameter + size * average / (root(square) / correction + eps);
    }
};

// Chen et al., arXiv:2302.06675, algorithm 2.
struct Lion {
    static constexpr int kStates = 1;
    static constexpr bool kSigned[3] = {true, true, true};
    F keep, beta1, rest1, beta2, rest2, size;

    Lion(const Job& job, float)
        : keep(number(job, 0)), beta1(number(job, 1)), rest1(number(job, 2)), beta2(number(job, 3)),
          rest2(number(job, 4)), size(number(job, 5)) {}

    inline F operator()(F parameter, F gradient, F* state) const {
        const F direction = fma(gradient, rest1, state[0] * beta1);
        const F step = select(direction > F{}, size, select(direction < F{}, -size, F{}));
        state[0] = fma(gradient, rest2, state[0] * beta2);
        return parameter * keep - step;
    }
};

// Duchi et al., JMLR 12 (2011).
template <bool kCoupled>
struct Adagrad {
    static constexpr int kStates = 1;
    static constexpr bool kSigned[3] = {false, false, false};
    F decay, eps, size;

    Adagrad(const Job& job, float) : decay(number(job, 0)), eps(number(job, 1)), size(number(job, 2)) {}

    inline F operator()(F parameter, F gradient, F* state) const {
        if constexpr (kCoupled) gradient = fma(parameter, decay, gradient);
        const F sum = state[0] = fma(gradient, gradient, state[0]);
        return parameter - size * gradient / (root(sum) + eps);
    }
};

// Sutskever et al., ICML 2013, as torch.optim.SGD writes it.
template <bool kMomentum, bool kCoupled>
struct Sgd {
    static constexpr int kStates = kMomentum ? 1 : 0;
    static constexpr bool kSigned[3] = {true, true, true};
    F decay, momentum, rest, size;
    bool first, nesterov;

    Sgd(const Job& job, float)
        : decay(number(job, 0)), momentum(number(job, 1)), rest(number(job, 2)), size(number(job, 3)),
          first(has(job, windlass::kFirst)), nesterov(has(job, windlass::kNesterov)) {}

    inline F operator()(F parameter, F gradient, F* state) const {
        if constexpr (kCoupled) gradient = fma(parameter, decay, gradient);
        if constexpr (kMomentum) {
            state[0] = first ? gradient : fma(gradient, rest, state[0] * momentum);
            gradient = nesterov ? fma(state[0], momentum, gradient) : state[0];
        }
        return fma(gradient, size, parameter);
    }
};

// You et al., arXiv:1904.00962, algorithm 2; `ratio` is the trust ratio of the whole parameter.
struct Lamb {
    static constexpr int kStates = 2;
    static constexpr bool kSigned[3] = {true, false, false};
    F beta1, rest1, beta2, rest2, eps, decay, size;
    bool inside, decays;

    Lamb(const Job& job, float ratio)
        : beta1(number(job, 0)), rest1(number(job, 1)), beta2(number(job, 2)), rest2(number(job, 3)),
          eps(number(job, 4)), decay(number(job, 5)), size(all(ratio * static_cast<float>(job.numbers[6]))),
          inside(has(job, windlass::kEpsInsideRoot)), decays(job.numbers[5] != 0) {}

    inline F direction(F parameter, F gradient, F* state) const {
        state[0] = fma(gradient, rest1, state[0] * beta1);
        state[1] = fma(rest2 * gradient, gradient, state[1] * beta2);
        const F update = state[0] / (inside ? root(state[1] + eps) : root(state[1]) + eps);
        return decays ? fma(parameter, decay, update) : update;
    }

    inline F operator()(F parameter, F gradient, F* state) const {
        return parameter - direction(parameter, gradient, state) * size;
    }
};

}  // namespace
