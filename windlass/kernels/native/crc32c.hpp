// CRC-32C (Castagnoli) of pages of 4096 bytes, by the processor's own instructions if it has some.
//
// The instruction of CRC-32C has a latency of three cycles and a throughput of one per cycle, so that a single checksum
// would run at a third of the possible rate: four pages are hashed in parallel. Where the processor has carry-less
// multiplication of whole cache lines, that is faster still: a page is hashed about as fast as it is read.
// windlass/kernels/reference/crc32c.py is the reference.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace windlass {

inline constexpr uint64_t kCrcPage = 4096;
inline constexpr uint64_t kCrcStreams = 4;

// Writes the checksum of each of `count` pages.
using CrcPages = void (*)(const char* pages, uint64_t count, uint32_t* sums);

struct CrcPath {
    const char* name;
    CrcPages pages;
};

namespace crc {

inline constexpr uint64_t kLine = 64;  // bytes of a cache line

inline uint64_t word(const char* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    if constexpr (std::endian::native == std::endian::big) value = __builtin_bswap64(value);
    return value;
}

// Eight tables, to fold in a word of 64 bits at a time.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

inline constexpr Tables make_tables() {
    constexpr uint32_t kReversed = 0x82F63B78;
    Tables tables{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kReversed : 0);
        tables[0][byte] = value;
    }
    for (uint32_t byte = 0; byte < 256; ++byte) {
        for (unsigned level = 1; level < 8; ++level) {
            const uint32_t before = tables[level - 1][byte];
            tables[level][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}

inline constexpr Tables kTables = make_tables();

inline void by_table(const char* pages, uint64_t count, uint32_t* sums) {
    for (uint64_t page = 0; page < count; ++page) {
        uint32_t value = ~0u;
        for (uint64_t at = 0; at < kCrcPage; at += 8) {
            const uint64_t mixed = word(pages + page * kCrcPage + at) ^ value;
            value = 0;
            for (unsigned byte = 0; byte < 8; ++byte) value ^= kTables[7 - byte][mixed >> (8 * byte) & 0xFF];
        }
        sums[page] = ~value;
    }
}

// `Step` folds one word into a checksum. Always inlined into its callers, which name the instruction set.
template <typename Step>
[[gnu::always_inline]] inline void side_by_side(const char* pages, uint64_t count, uint32_t* sums, Step step) {
    uint64_t page = 0;
    for (; page + kCrcStreams <= count; page += kCrcStreams) {
        const char* first = pages + page * kCrcPage;
        uint64_t a = ~0u, b = ~0u, c = ~0u, d = ~0u;
        for (uint64_t line = 0; line < kCrcPage; line += kLine) {
            // The hardware prefetcher stops at page boundaries, so prefetch the next four pages here. A prefetch beyond
            // the end of the memory does nothing.
            for (uint64_t next = kCrcStreams; next < 2 * kCrcStreams; ++next) {
                __builtin_prefetch(first + next * kCrcPage + line);
            }
            for (uint64_t at = line; at < line + kLine; at += 8) {
                a = step(a, word(first + at));
                b = step(b, word(first + kCrcPage + at));
                c = step(c, word(first + 2 * kCrcPage + at));
                d = step(d, word(first + 3 * kCrcPage + at));
            }
        }
        sums[page] = ~static_cast<uint32_t>(a);
        sums[page + 1] = ~static_cast<uint32_t>(b);
        sums[page + 2] = ~static_cast<uint32_t>(c);
        sums[page + 3] = ~static_cast<uint32_t>(d);
    }
    for (; page < count; ++page) {
        uint64_t value = ~0u;
        for (uint64_t at = 0; at < kCrcPage; at += 8) value = step(value, word(pages + page * kCrcPage + at));
        sums[page] = ~static_cast<uint32_t>(value);
    }
}

#if defined(__x86_64__)
struct Sse42 {
    [[gnu::always_inline]] uint64_t operator()(uint64_t value, uint64_t word) const {
        // Inline assembly: the builtin would not be inlined into a loop that is compiled without an instruction set.
        asm("crc32q %1, %0" : "+r"(value) : "rm"(word));
        return value;
    }
};

[[gnu::target("sse4.2")]] inline void by_sse42(const char* pages, uint64_t count, uint32_t* sums) {
    side_by_side(pages, count, sums, Sse42{});
}

#define WINDLASS_FOLDS gnu::target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")

// Factors by which 128 bits are moved D bits towards the end of the page: x^(D + 32) and x^(D - 32) modulo the polynomial,
// reflected. The first is for the 64 bits in front. Gopal et al., Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ, 2009.
struct Factors {
    long long front, back;
};

inline constexpr Factors kMove512{0x740eef02, 0x9e4addf8};
inline constexpr Factors kMove384{0x1c291d04, 0x1d82c63da}, kMove256{0x1384aa63a, 0xba4fc28e};
inline constexpr Factors kMove128{0xf20c0dfe, 0x14cd00bd6};

// Moves each 128 bits of `from` by `factors`, and adds them to those of `to`.
[[gnu::always_inline, WINDLASS_FOLDS]] inline __m512i fold(__m512i from, __m512i factors, __m512i to) {
    constexpr int kXorOfThree = 0x96;
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(from, factors, 0x00),
                                     _mm512_clmulepi64_epi128(from, factors, 0x11), to, kXorOfThree);
}

// Folds kPages pages side by side, because several pages arrive from memory faster than one.
template <uint64_t kPages>
[[gnu::always_inline, WINDLASS_FOLDS]] inline void fold_pages(const char* first, uint32_t* sums) {
    const __m512i near = _mm512_broadcast_i32x4(_mm_set_epi64x(kMove512.back, kMove512.front));
    // The last 128 bits stay where they are.
    const __m512i lanes = _mm512_set_epi64(0, 0, kMove128.back, kMove128.front, kMove256.back, kMove256.front,
                                           kMove384.back, kMove384.front);
    __m512i parts[kPages];
    for (uint64_t page = 0; page < kPages; ++page) {
        parts[page] = _mm512_xor_si512(_mm512_loadu_si512(first + page * kCrcPage),
                                       _mm512_zextsi128_si512(_mm_cvtsi32_si128(-1)));
    }
    for (uint64_t line = kLine; line < kCrcPage; line += kLine) {
        for (uint64_t page = 0; page < kPages; ++page) {
            const char* at = first + page * kCrcPage + line;
            // The hardware prefetcher stops at page boundaries. A prefetch beyond the end of the memory does nothing.
            __builtin_prefetch(at + kPages * kCrcPage);
            parts[page] = fold(parts[page], near, _mm512_loadu_si512(at));
        }
    }
    for (uint64_t page = 0; page < kPages; ++page) {
        const __m512i last = _mm512_zextsi128_si512(_mm512_extracti32x4_epi32(parts[page], 3));
        const __m512i moved = fold(parts[page], lanes, last);
        const __m128i folded = _mm_xor_si128(
            _mm_xor_si128(_mm512_castsi512_si128(moved), _mm512_extracti32x4_epi32(moved, 1)),
            _mm512_extracti32x4_epi32(moved, 2));
        const auto front = static_cast<uint64_t>(_mm_cvtsi128_si64(folded));
        const auto back = static_cast<uint64_t>(_mm_extract_epi64(folded, 1));
        sums[page] = ~static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, front), back));
    }
}

[[WINDLASS_FOLDS]] inline void by_folds(const char* pages, uint64_t count, uint32_t* sums) {
    uint64_t page = 0;
    for (; page + kCrcStreams <= count; page += kCrcStreams) fold_pages<kCrcStreams>(pages + page * kCrcPage, sums + page);
    for (; page < count; ++page) fold_pages<1>(pages + page * kCrcPage, sums + page);
}
#endif

#if defined(__aarch64__) && defined(__linux__)
struct Armv8 {
    [[gnu::always_inline]] uint64_t operator()(uint64_t value, uint64_t word) const {
        uint32_t folded = static_cast<uint32_t>(value);
        // Inline assembly: the builtin has different names in GCC and Clang.
        asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(folded) : "r"(word));
        return folded;
    }
};

inline void by_armv8(const char* pages, uint64_t count, uint32_t* sums) {
    side_by_side(pages, count, sums, Armv8{});
}
#endif

}  // namespace crc

// All implementations that this processor supports, the fastest first.
inline const std::vector<CrcPath>& crc_paths() {
    static const std::vector<CrcPath> found = [] {
        std::vector<CrcPath> paths;
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
            __builtin_cpu_supports("avx512vl")) {
            paths.push_back({"VPCLMULQDQ", crc::by_folds});
        }
        if (__builtin_cpu_supports("sse4.2")) paths.push_back({"SSE4.2", crc::by_sse42});
#endif
#if defined(__aarch64__) && defined(__linux__)
        constexpr unsigned long kCrc32 = 1ul << 7;  // HWCAP_CRC32
        if (getauxval(AT_HWCAP) & kCrc32) paths.push_back({"ARMv8 CRC", crc::by_armv8});
#endif
        paths.push_back({"tables", crc::by_table});
        return paths;
    }();
    return found;
}

// Writes the checksum of each page, with the fastest implementation.
inline void crc_write(const char* pages, uint64_t count, uint32_t* sums) { crc_paths().front().pages(pages, count, sums); }

// Returns the first page whose checksum differs from that in `sums`, or `count`.
inline uint64_t crc_first_wrong(const char* pages, uint64_t count, const uint32_t* sums) {
    constexpr uint64_t kAtOnce = 64;
    uint32_t found[kAtOnce];
    for (uint64_t page = 0; page < count; page += kAtOnce) {
        const uint64_t some = std::min(kAtOnce, count - page);
        crc_write(pages + page * kCrcPage, some, found);
        if (std::memcmp(found, sums + page, some * sizeof(uint32_t)) == 0) continue;
        for (uint64_t one = 0; one < some; ++one) {
            if (found[one] != sums[page + one]) return page + one;
        }
    }
    return count;
}

}  // namespace windlass
