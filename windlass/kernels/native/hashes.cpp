// The module windlass.kernels._hashes: sums of keyed words. windlass/kernels/reference/keyed_sum.py is the reference.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "team.hpp"

namespace nb = nanobind;

namespace {

constexpr std::int64_t kBlock = 4096;  // elements that share a factor
constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15;
constexpr std::int64_t kPart = 256 * kBlock;  // elements that a thread processes at a time

// The finalizer of splitmix64 (Steele et al. 2014), made odd.
constexpr std::uint64_t odd(std::uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
    return (value ^ (value >> 31)) | 1;
}

struct Keys {
    alignas(64) std::uint64_t of[kBlock];
    Keys() {
        for (std::int64_t i = 0; i < kBlock; ++i) of[i] = odd(static_cast<std::uint64_t>(i + 1) * kStep);
    }
};

const Keys& keys() {
    static const Keys found;
    return found;
}

template <class Word>
[[gnu::always_inline]] inline std::uint64_t products(const Word* words, const std::uint64_t* keys, std::int64_t count) {
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        sum += static_cast<std::uint64_t>(static_cast<std::int64_t>(words[i])) * keys[i];  // sign-extended
    }
    return sum;
}

template <class Word>
[[gnu::always_inline]] inline std::uint64_t sum_of(const Word* words, std::int64_t count, std::int64_t start,
                                                   std::uint64_t seed) {
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < count;) {
        const std::int64_t block = (start + i) / kBlock, column = (start + i) % kBlock;
        const std::int64_t size = std::min(kBlock - column, count - i);
        sum += products(words + i, keys().of + column, size) * odd(static_cast<std::uint64_t>(block) * kStep + seed);
        i += size;
    }
    return sum;
}

[[gnu::always_inline]] inline std::uint64_t sum_of_any(int width, std::uintptr_t address, std::int64_t count,
                                                       std::int64_t start, std::uint64_t seed) {
    switch (width) {
        case 1:
            return sum_of(reinterpret_cast<const std::int8_t*>(address), count, start, seed);
        case 2:
            return sum_of(reinterpret_cast<const std::int16_t*>(address), count, start, seed);
        case 4:
            return sum_of(reinterpret_cast<const std::int32_t*>(address), count, start, seed);
        default:
            return sum_of(reinterpret_cast<const std::int64_t*>(address), count, start, seed);
    }
}

using Sum = std::uint64_t (*)(int, std::uintptr_t, std::int64_t, std::int64_t, std::uint64_t);

std::uint64_t plain(int width, std::uintptr_t address, std::int64_t count, std::int64_t start, std::uint64_t seed) {
    return sum_of_any(width, address, count, start, seed);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] std::uint64_t avx2(int width, std::uintptr_t address, std::int64_t count, std::int64_t start,
                                           std::uint64_t seed) {
    return sum_of_any(width, address, count, start, seed);
}

[[gnu::target("avx512f,avx512dq,avx512vl,avx512bw")]] std::uint64_t avx512(int width, std::uintptr_t address,
                                                                           std::int64_t count, std::int64_t start,
                                                                           std::uint64_t seed) {
    return sum_of_any(width, address, count, start, seed);
}
#endif

Sum best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return avx512;
    if (__builtin_cpu_supports("avx2")) return avx2;
#endif
    return plain;
}

std::uint64_t keyed_sum(std::uint64_t address, int width, std::int64_t count, std::int64_t start, std::uint64_t seed,
                        int threads) {
    if (width != 1 && width != 2 && width != 4 && width != 8) throw std::invalid_argument("words have 1 to 8 bytes");
    if (count < 0) throw std::invalid_argument("a sum has a negative number of words");
    if (start < 0) throw std::invalid_argument("words begin at a negative place");
    if (count > 0 && address == 0) throw std::invalid_argument("there is no memory at address 0");
    static const Sum sum = best();
    keys();  // initialize before threads use them
    if (count <= 0) return 0;
    const auto parts = static_cast<int>((count + kPart - 1) / kPart);
    std::vector<std::uint64_t> sums(parts);
    windlass::run_in_team(std::min(threads, parts), parts, [&](int number) {
        const std::int64_t first = number * kPart;
        sums[number] = sum(width, static_cast<std::uintptr_t>(address) + first * width, std::min(kPart, count - first),
                           start + first, seed);
    });
    std::uint64_t total = 0;
    for (const std::uint64_t one : sums) total += one;
    return total;
}

}  // namespace

NB_MODULE(_hashes, m) {
    nb::set_leak_warnings(false);
    m.doc() = "Hashes of raw memory; call them through windlass.kernels.native_keyed_sum.";
    m.def("keyed_sum", &keyed_sum, nb::arg("address"), nb::arg("width"), nb::arg("count"), nb::arg("start"),
          nb::arg("seed"), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
}
