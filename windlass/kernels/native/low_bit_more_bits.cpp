// Products of few rows of float inputs with codes of 3 to 8 bits, for the instruction set that this file is compiled
// for; WINDLASS_SET names it.
#include "low_bit_float_rows.hpp"

namespace windlass {
const FewRows WINDLASS_MORE_BITS = {multiply_float_rows<false>};
}
