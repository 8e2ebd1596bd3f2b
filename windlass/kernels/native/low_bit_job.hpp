// Jobs of products with packed codes of 1 to 8 bits, in plain numbers and addresses.
#pragma once

#include "inference_job.hpp"

namespace windlass {

// Codes of a weight. A unit is kUnit features of the 16 outputs of a panel, in as many cache lines as a code has bits.
// `halves` are codes of 8 bits that a slice of a product was widened to; no weight is packed so.
enum class Codes : int { one = 1, two = 2, three = 3, four = 4, eight = 8, float8 = 9, halves = 16 };

constexpr std::int64_t kUnit = 32;
constexpr std::int64_t kUnitSteps = kUnit / 4;  // a step is a line of bytes: 4 features of 16 outputs
constexpr std::int64_t kGroupUnits = kCodeGroup / kUnit;

constexpr int lines_of(Codes codes) { return codes == Codes::float8 ? 8 : static_cast<int>(codes); }

// y[m, n] = sum_k x[m, k] * (code[n, k] - zero[n, g] - shift[n, g]) * group_scale[n, g] * scale[n] + bias[n],
// g = k / (32 * units). `panels` has the codes; `code` is not used. Shifts need float inputs.
struct LowBitJob : GemmJob {
    Codes codes;
    std::int64_t span_units;            // units that share a scale: 1, 2 or 4
    const std::uint16_t* group_scales;  // fp16 [panels, spans, 16]; nullptr: 1
    const std::uint8_t* zeros;          // [panels, spans, 16]; nullptr: `zero` everywhere
    int zero;
    const float* wide_scales;           // [panels, spans, 16], instead of group_scales
    const float* shifts;                // [panels, spans, 16]; nullptr: 0

    std::int64_t units() const { return (features + kUnit - 1) / kUnit; }
    std::int64_t spans() const { return (units() + span_units - 1) / span_units; }
    std::int64_t panel_bytes() const { return units() * kStepBytes * lines_of(codes); }
};

// Codes as a file has them.
struct CodeRows {
    const std::uint8_t* from;
    std::int64_t row_bytes;
    bool trits;  // five digits of base 3 a byte; else `bits` bits a code, from the lowest
    int bits;

    unsigned at(std::int64_t row, std::int64_t feature) const {
        const std::uint8_t* line = from + row * row_bytes;
        if (trits) {
            static constexpr unsigned kPowers[5] = {1, 3, 9, 27, 81};
            return line[feature / 5] / kPowers[feature % 5] % 3;
        }
        const std::int64_t bit = feature * bits, byte = bit / 8;
        unsigned word = line[byte];
        if (bit % 8 + bits > 8) word |= static_cast<unsigned>(line[byte + 1]) << 8;
        return word >> (bit % 8) & ((1u << bits) - 1);
    }
};

// Kernels of one instruction set.
struct LowBitSet {
    std::int64_t (*divide_rows)(const LowBitJob&, RowBlock* blocks, std::int64_t* bytes);
    void (*pack_rows)(const LowBitJob&, const RowBlock&, char* packed);
    // Computes the outputs of panels [begin, end) for blocks [first, last); `tiles` has tile_bytes, aligned to 64.
    void (*multiply)(const LowBitJob&, const RowBlock* blocks, std::int64_t first, std::int64_t last,
                     const char* packed, std::int64_t begin, std::int64_t end, char* tiles);
    std::int64_t (*panel_group)(const LowBitJob&);  // panels that `multiply` computes best in one call
    // Bytes for the sums of that many blocks and panels; 0 if sums are not kept between slices.
    std::int64_t (*tile_bytes)(const LowBitJob&, std::int64_t blocks, std::int64_t panels);
};

// Kernel of one instruction set for rows that are one block, or a pair of blocks.
struct FewRows {
    void (*multiply)(const LowBitJob&, const RowBlock* blocks, const char* packed, std::int64_t begin,
                     std::int64_t end);
};

extern const LowBitSet kLowBitBaseline;
#if defined(__x86_64__)
extern const LowBitSet kLowBitAvx2;
extern const LowBitSet kLowBitAvx512;
extern const LowBitSet kLowBitAvxVnni;
extern const LowBitSet kLowBitAvx512Vnni;
#endif

}  // namespace windlass
