// One optimizer update as plain numbers and addresses, shared by the module and every instruction set.
#pragma once

#include <cstdint>

namespace windlass {

// Elements that share one scale of 8-bit states; also the granularity at which work is split.
constexpr std::int64_t kBlock = 256;
constexpr int kMostStates = 3;

enum class Format : int { fp32 = 0, bf16 = 1, fp16 = 2, coded = 3, none = 4 };
enum class Rule : int { adam = 0, lion = 1, adagrad = 2, sgd = 3, lamb = 4 };

// The bits of Job::flags. They are set by windlass/kernels/update_rules.py.
enum Flag : unsigned {
    kCoupledDecay = 1,    // decay is added to the gradient (L2), not subtracted from the parameter
    kAmsgrad = 2,         // Adam divides by the largest second moment so far
    kMomentum = 4,        // SGD keeps a buffer
    kNesterov = 8,        // SGD with Nesterov momentum
    kFirst = 16,          // SGD's buffer has no value yet: it becomes the gradient
    kEpsInsideRoot = 32,  // LAMB divides by sqrt(v + eps)
};

// One flat parameter with its gradient, states and copies. Addresses of first elements; 0: none.
struct Piece {
    std::uint64_t parameter, gradient, lowered;
    std::uint64_t state[kMostStates], scale[kMostStates];
    std::int64_t count;
};

struct Job {
    Rule rule;
    Format parameter, gradient, state, lowered;
    unsigned flags;
    float divisor;      // gradients are divided by it; negative if the objective is maximized
    std::uint32_t seed;  // seed of the stochastic rounding of narrow states
    const double* numbers;
};

// Every function works on the elements [begin, end) of a piece; begin is a multiple of kBlock.
struct InstructionSet {
    const char* name;
    // `ratio` scales the step of LAMB and is not used by other rules.
    void (*update)(const Job&, const Piece&, std::int64_t begin, std::int64_t end, float ratio);
    // LAMB's first pass: sums[2 b] and sums[2 b + 1] become the sums of squares of parameter and update over block b.
    void (*norms)(const Job&, const Piece&, std::int64_t begin, std::int64_t end, double* sums);
};

extern const InstructionSet kBaseline;
#if defined(__x86_64__)
extern const InstructionSet kAvx2;
extern const InstructionSet kAvx512;
#endif

}  // namespace windlass
