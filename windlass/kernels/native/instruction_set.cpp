// All update rules for the instruction set that this file is compiled for, once for each set; WINDLASS_SET names it.
#include "sweep.hpp"

namespace {

using Update = void (*)(const Job&, const Piece&, std::int64_t, std::int64_t, float);

Update chosen(const Job& job) {
    const bool coupled = has(job, windlass::kCoupledDecay);
    switch (job.rule) {
        case windlass::Rule::adam:
            if (has(job, windlass::kAmsgrad)) {
                return coupled ? update_with<Adam<true, true>> : update_with<Adam<false, true>>;
            }
            return coupled ? update_with<Adam<true, false>> : update_with<Adam<false, false>>;
        case windlass::Rule::lion:
            return update_with<Lion>;
        case windlass::Rule::adagrad:
            return coupled ? update_with<Adagrad<true>> : update_with<Adagrad<false>>;
        case windlass::Rule::sgd:
            if (has(job, windlass::kMomentum)) {
                return coupled ? update_with<Sgd<true, true>> : update_with<Sgd<true, false>>;
            }
            return coupled ? update_with<Sgd<false, true>> : update_with<Sgd<false, false>>;
        case windlass::Rule::lamb:
            break;
    }
    return update_with<Lamb>;
}

void update(const Job& job, const Piece& piece, std::int64_t begin, std::int64_t end, float ratio) {
    chosen(job)(job, piece, begin, end, ratio);
}

void norms(const Job& job, const Piece& piece, std::int64_t begin, std::int64_t end, double* sums) {
    switch (job.state) {
        case Format::coded:
            return norms_of_blocks<Format::coded>(job, piece, begin, end, sums);
        case Format::bf16:
            return norms_of_blocks<Format::bf16>(job, piece, begin, end, sums);
        default:
            return norms_of_blocks<Format::fp32>(job, piece, begin, end, sums);
    }
}

}  // namespace

#define WINDLASS_TEXT_OF(name) #name
#define WINDLASS_TEXT(name) WINDLASS_TEXT_OF(name)

namespace windlass {
const InstructionSet WINDLASS_SET = {WINDLASS_TEXT(WINDLASS_SET), update, norms};
}
