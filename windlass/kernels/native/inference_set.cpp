// Kernels of inference for the instruction set that this file is compiled for, once for each; WINDLASS_SET names it.
#include "attention.hpp"
#include "fused.hpp"
#include "gemm.hpp"

#define WINDLASS_TEXT_OF(name) #name
#define WINDLASS_TEXT(name) WINDLASS_TEXT_OF(name)

namespace windlass {
const InferenceSet WINDLASS_SET = {WINDLASS_TEXT(WINDLASS_SET), divide_rows, pack_rows,
                                   multiply, panel_group, read_words, attend, attention_scratch, write_heads,
                                   normalize_rows, add_elements, rotate_rows, gate_rows};
}
