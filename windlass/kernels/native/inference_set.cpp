// Kernels of inference for the instruction set that this file is compiled for, once for each; WINDLASS_SET names it.
//
// A set with dot products differs from the set without them, WINDLASS_WIDE_INFERENCE, only in the products that use
// them. It calls that set's other kernels, because its own would compile to the same instructions and take most of the
// compiler's time.
#include "gemm.hpp"
#if !defined(WINDLASS_WIDE_INFERENCE)
#include "attention.hpp"
#include "fused.hpp"
#include "sampling.hpp"
#endif

#define WINDLASS_TEXT_OF(name) #name
#define WINDLASS_TEXT(name) WINDLASS_TEXT_OF(name)

namespace windlass {
#if defined(WINDLASS_WIDE_INFERENCE)

// A function instead of a copy of the other set's pointer: code that copies it would run when the module is loaded, on
// processors that lack the instruction set too.
template <auto kKernel>
struct Wide;

template <class Result, class... Arguments, Result (*InferenceSet::*kKernel)(Arguments...)>
struct Wide<kKernel> {
    static Result call(Arguments... arguments) { return (WINDLASS_WIDE_INFERENCE.*kKernel)(arguments...); }
};

const InferenceSet WINDLASS_SET = {WINDLASS_TEXT(WINDLASS_SET),
                                   divide_rows,
                                   pack_rows,
                                   multiply,
                                   panel_group,
                                   Wide<&InferenceSet::read_words>::call,
                                   Wide<&InferenceSet::attend>::call,
                                   Wide<&InferenceSet::attention_scratch>::call,
                                   Wide<&InferenceSet::write_heads>::call,
                                   Wide<&InferenceSet::normalize_rows>::call,
                                   Wide<&InferenceSet::add_elements>::call,
                                   Wide<&InferenceSet::rotate_rows>::call,
                                   Wide<&InferenceSet::gate_rows>::call,
                                   Wide<&InferenceSet::find_maxima>::call,
                                   Wide<&InferenceSet::weigh>::call,
                                   Wide<&InferenceSet::collect>::call};

#else

const InferenceSet WINDLASS_SET = {WINDLASS_TEXT(WINDLASS_SET), divide_rows, pack_rows,
                                   multiply, panel_group, read_words, attend, attention_scratch, write_heads,
                                   normalize_rows, add_elements, rotate_rows, gate_rows,
                                   find_maxima, weigh, collect};

#endif
}  // namespace windlass
