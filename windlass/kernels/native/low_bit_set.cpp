// Products of packed codes for the instruction set that this file is compiled for, once for each; WINDLASS_SET names it.
#include "low_bit.hpp"

namespace windlass {
const LowBitSet WINDLASS_SET = {low_bit_divide, low_bit_pack_rows, low_bit_multiply, low_bit_panel_group,
                                low_bit_tile_bytes};
}
