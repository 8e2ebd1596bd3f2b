// Instruction sets, checks of arguments and scratch memory, shared by the modules of inference and of packed codes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace windlass {

template <class Set>
struct NamedSet {
    std::string name;
    const Set* set;
};

// Sets of a module. Sets other than `baseline` are nullptr if they are not built.
template <class Set>
struct BuiltSets {
    const Set* baseline;
    const Set* avx2 = nullptr;
    const Set* avx_vnni = nullptr;
    const Set* avx512 = nullptr;
    const Set* avx512_vnni = nullptr;
    const Set* avx512_bf16 = nullptr;
};

#if defined(__x86_64__)
// Reads the processor's bit itself, since compilers differ in the name that __builtin_cpu_supports takes.
inline bool has_avx_vnni() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}
#endif

// Sets that this processor has, best first.
template <class Set>
std::vector<NamedSet<Set>> find_sets(const BuiltSets<Set>& built) {
    std::vector<NamedSet<Set>> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    if (has_vnni && __builtin_cpu_supports("avx512bf16")) sets.push_back({"AVX-512-BF16", built.avx512_bf16});
    if (has_vnni) sets.push_back({"AVX-512-VNNI", built.avx512_vnni});
    if (has_avx512) sets.push_back({"AVX-512", built.avx512});
    if (has_avx2 && built.avx_vnni != nullptr && has_avx_vnni()) sets.push_back({"AVX-VNNI", built.avx_vnni});
    if (has_avx2) sets.push_back({"AVX2", built.avx2});
    sets.push_back({"baseline", built.baseline});
#elif defined(__aarch64__)
    sets.push_back({"NEON", built.baseline});
#else
    sets.push_back({"baseline", built.baseline});
#endif
    return sets;
}

template <class Set>
std::vector<std::string> names_of(const std::vector<NamedSet<Set>>& sets) {
    std::vector<std::string> names;
    for (const NamedSet<Set>& set : sets) names.push_back(set.name);
    return names;
}

template <class Set>
const Set& set_at(const std::vector<NamedSet<Set>>& sets, int number) {
    if (number < 0 || number >= static_cast<int>(sets.size())) throw std::invalid_argument("there is no such instruction set");
    return *sets[number].set;
}

// Memory that a thread keeps for the next call, aligned to cache lines.
class Scratch {
   public:
    char* get(std::int64_t bytes) {
        if (bytes > size_) {
            memory_.reset();
            size_ = (bytes + 4095) / 4096 * 4096;
            memory_.reset(static_cast<char*>(std::aligned_alloc(4096, size_)));
            if (memory_ == nullptr) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return memory_.get();
    }

   private:
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    std::int64_t size_ = 0;
};

inline void refuse(bool wrong, const char* problem) {
    if (wrong) throw std::invalid_argument(problem);
}

}  // namespace windlass
