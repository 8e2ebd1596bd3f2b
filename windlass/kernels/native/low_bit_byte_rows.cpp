// Products of few rows of int8 inputs with packed codes, for the instruction set that this file is compiled for;
// WINDLASS_SET names it. Codes are expanded in registers while they stream from memory.
#include "low_bit.hpp"

namespace {

template <Codes kCodes, int kRows, int kPanels>
void multiply_byte_block(const LowBitJob& job, const RowBlock& block, const char* packed, std::int64_t begin,
                         std::int64_t end) {
    alignas(64) float tile[kRows * kPanels * kPanel];
    std::int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels) {
        const TilePlace<kPanels> place(job, panel);
        FetchPanels<kPanels> fetch(job, windlass::lines_of(kCodes));
        add_bytes_to_tile<kCodes, bits_of_codes<kCodes>(), kRows, kPanels>(job, place, packed + block.offset, 0,
                                                                           job.units(), fetch, tile);
        finish_rows_of<kPanels>(job, block, tile, panel * kPanel);
    }
    if constexpr (kPanels > 1) {
        if (panel < end) multiply_byte_block<kCodes, kRows, (kPanels > 4 ? 2 : 1)>(job, block, packed, panel, end);
    }
}

// Multiplies two blocks, which expand codes in registers, one after the other while a slice is in the first-level
// cache.
template <Codes kCodes, int kPanels>
void multiply_byte_pair(const LowBitJob& job, const RowBlock* blocks, const char* packed, std::int64_t begin,
                       std::int64_t end) {
    constexpr std::int64_t kTile = kPairBlock * kPanels * kPanel;
    alignas(64) float tiles[2 * kTile];
    const std::int64_t units = job.units();
    FetchPanels<kPanels> fetch(job, windlass::lines_of(kCodes));
    std::int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels) {
        const TilePlace<kPanels> place(job, panel);
        for (std::int64_t first = 0; first < units; first += kByteSlice) {
            const std::int64_t stop = first + kByteSlice < units ? first + kByteSlice : units;
            TilePlace<kPanels> here = place;
            for (int i = 0; i < kPanels; ++i) here.lines[i] += first * kStepBytes * windlass::lines_of(kCodes);
            for (int i = 0; i < 2; ++i) {
                fetch.share = i;
                add_bytes_to_tile<kCodes, 8, kPairBlock, kPanels>(job, here, packed + blocks[i].offset, first, stop,
                                                                  fetch, tiles + i * kTile);
            }
        }
        for (int i = 0; i < 2; ++i) finish_rows_of<kPanels>(job, blocks[i], tiles + i * kTile, panel * kPanel);
    }
    if constexpr (kPanels > 1) {
        if (panel < end) multiply_byte_pair<kCodes, 1>(job, blocks, packed, panel, end);
    }
}

void multiply_byte_rows(const LowBitJob& job, const RowBlock* blocks, const char* packed, std::int64_t begin,
                        std::int64_t end) {
    with_codes(job.codes, [&](auto codes) {
        if constexpr (codes != Codes::float8) {
            if constexpr (kPairRows > 0) {
                if (is_pair(job)) return multiply_byte_pair<codes, kPairPanels>(job, blocks, packed, begin, end);
            }
            with_rows(blocks->padded, [&](auto rows) {
                if constexpr (rows <= kNarrowRows) {
                    multiply_byte_block<codes, rows, panels_for(rows, 2)>(job, *blocks, packed, begin, end);
                }
            });
        }
    });
}

}  // namespace

namespace windlass {
const FewRows WINDLASS_BYTE_ROWS = {multiply_byte_rows};
}
