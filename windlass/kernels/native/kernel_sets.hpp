// Instruction sets, checks of arguments and scratch memory, shared by the modules of inference and of packed codes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace windlass {

template <class Set>
struct NamedSet {
    std::string name;
    const Set* set;
};

// Sets that this processor has, best first. The arguments beside `baseline` are nullptr where they are not built.
template <class Set>
std::vector<NamedSet<Set>> find_sets(const Set* baseline, [[maybe_unused]] const Set* avx2,
                                     [[maybe_unused]] const Set* avx512, [[maybe_unused]] const Set* avx512_dot) {
    std::vector<NamedSet<Set>> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_dot = has_avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (has_dot) sets.push_back({"AVX-512-BF16", avx512_dot});
    if (has_avx512) sets.push_back({"AVX-512", avx512});
    if (has_avx2) sets.push_back({"AVX2", avx2});
    sets.push_back({"baseline", baseline});
#elif defined(__aarch64__)
    sets.push_back({"NEON", baseline});
#else
    sets.push_back({"baseline", baseline});
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
