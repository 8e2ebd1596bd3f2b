// The module windlass.kernels._optimizers: optimizer updates on raw addresses, linked against nothing but Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "job.hpp"
#include "page_sums.hpp"
#include "team.hpp"

namespace nb = nanobind;

namespace windlass {
namespace {

using Addresses = std::array<std::uint64_t, 10>;
using PageAddresses = std::array<std::uint64_t, 5>;  // pages, their number, expected sums, renewed sums, states

// Instruction sets that this processor has, the best first.
std::vector<const InstructionSet*> supported() {
    std::vector<const InstructionSet*> sets;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx2 && avx512) sets.push_back(&kAvx512);
    if (avx2) sets.push_back(&kAvx2);
#endif
    sets.push_back(&kBaseline);
    return sets;
}

std::string public_name(const InstructionSet& set) {
    const std::string name = set.name;
    if (name == "kAvx512") return "AVX-512";
    if (name == "kAvx2") return "AVX2";
#if defined(__aarch64__)
    return "NEON";
#else
    return "baseline";
#endif
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const InstructionSet* set : supported()) names.push_back(public_name(*set));
    return names;
}

const InstructionSet& find(const std::string& name) {
    static const std::vector<const InstructionSet*> sets = supported();
    for (const InstructionSet* set : sets) {
        if (public_name(*set) == name) return *set;
    }
    throw std::invalid_argument("this processor has no " + name);
}

// Elements of one part of the work. Each thread gets several parts, so that a delayed thread does not delay the others.
constexpr std::int64_t kLeastGrain = 128 * kBlock;  // 384 KiB of a parameter and two states in fp32: they fit into L2

std::int64_t grain(std::int64_t elements, int threads) {
    const std::int64_t share = elements / (threads * 8) / kBlock * kBlock;
    return share < kLeastGrain ? kLeastGrain : share;
}

struct Part {
    int piece;
    std::int64_t begin, end;
};

std::vector<Part> cut(const std::vector<Piece>& pieces, int threads, bool sums) {
    std::int64_t elements = 0;
    for (const Piece& piece : pieces) elements += piece.count;
    const std::int64_t size = sums ? kLeastGrain : grain(elements, threads);
    std::vector<Part> parts;
    for (int number = 0; number < static_cast<int>(pieces.size()); ++number) {
        const std::int64_t count = pieces[number].count;
        for (std::int64_t begin = 0; begin < count; begin += size) {
            parts.push_back({number, begin, count - begin < size ? count : begin + size});
        }
    }
    return parts;
}

// |parameter| / |update| within bounds, 1 if either is 0, in fp32 as in windlass.optim.lamb.
float trust_ratio(const std::vector<double>& sums, const double* bounds) {
    double weight = 0, update = 0;
    for (std::size_t i = 0; i < sums.size(); i += 2) {
        weight += sums[i];
        update += sums[i + 1];
    }
    const auto above = static_cast<float>(std::sqrt(weight)), below = static_cast<float>(std::sqrt(update));
    if (!(above > 0 && below > 0)) return 1.0f;
    const float ratio = above / below, least = static_cast<float>(bounds[0]), most = static_cast<float>(bounds[1]);
    return ratio < least ? least : ratio > most ? most : ratio;
}

std::vector<float> trust_ratios(const InstructionSet& set, const Job& job, const std::vector<Piece>& pieces,
                                const std::vector<Part>& parts, int threads) {
    std::vector<std::vector<double>> sums;
    for (const Piece& piece : pieces) sums.emplace_back(2 * ((piece.count + kBlock - 1) / kBlock));
    run_in_team(threads, static_cast<int>(parts.size()), [&](int number) {
        const Part& part = parts[number];
        set.norms(job, pieces[part.piece], part.begin, part.end, sums[part.piece].data());
    });
    std::vector<float> ratios;
    for (const auto& of_piece : sums) ratios.push_back(trust_ratio(of_piece, job.numbers + 7));
    return ratios;
}

// Memory of one tensor of a piece.
struct Range {
    std::uint64_t begin, end;
    bool written;
    std::size_t piece;
    const char* name;
};

std::int64_t width(Format format) { return format == Format::fp32 ? 4 : format == Format::coded ? 1 : 2; }

std::vector<Range> ranges_of(const Job& job, const std::vector<Piece>& pieces) {
    std::vector<Range> ranges;
    for (std::size_t number = 0; number < pieces.size(); ++number) {
        const Piece& piece = pieces[number];
        const auto add = [&](std::uint64_t address, std::int64_t bytes, bool written, const char* name) {
            if (address != 0) ranges.push_back({address, address + bytes, written, number, name});
        };
        add(piece.parameter, piece.count * width(job.parameter), true, "parameter");
        add(piece.gradient, piece.count * width(job.gradient), false, "gradient");
        add(piece.lowered, piece.count * width(job.lowered), true, "lowered copy");
        for (int state = 0; state < kMostStates; ++state) {
            add(piece.state[state], piece.count * width(job.state), true, "state");
            add(piece.scale[state], (piece.count + kBlock - 1) / kBlock * 4, true, "scales");
        }
    }
    return ranges;
}

// Written memory must not overlap other memory, because parts of the work run in parallel and in any order.
void refuse_overlaps(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    const Range* furthest = nullptr;          // previous range that ends last
    const Range* furthest_written = nullptr;  // the same among written ranges
    const auto refuse = [](const Range& a, const Range& b) {
        throw std::invalid_argument(std::string("the ") + a.name + " of piece " + std::to_string(a.piece) + " and the " +
                                    b.name + " of piece " + std::to_string(b.piece) + " share memory; pass a clone");
    };
    for (const Range& range : ranges) {
        const Range* other = range.written ? furthest : furthest_written;
        if (other != nullptr && range.begin < other->end) refuse(*other, range);
        if (furthest == nullptr || range.end > furthest->end) furthest = &range;
        if (range.written && (furthest_written == nullptr || range.end > furthest_written->end)) {
            furthest_written = &range;
        }
    }
}

// Checks for accesses outside the given memory.
void check(const Job& job, const std::vector<Piece>& pieces, std::size_t numbers, int threads) {
    const auto known = [](Format format, Format last) { return format >= Format::fp32 && format <= last; };
    if (job.rule < Rule::adam || job.rule > Rule::lamb) throw std::invalid_argument("there is no such rule");
    if (!known(job.parameter, Format::fp16) || !known(job.gradient, Format::fp16) || !known(job.state, Format::none) ||
        !known(job.lowered, Format::none)) {
        throw std::invalid_argument("there is no such format");
    }
    constexpr std::size_t needed[] = {8, 6, 3, 4, 9};  // in the order of Rule
    if (numbers < needed[static_cast<int>(job.rule)]) throw std::invalid_argument("too few numbers for the rule");
    if (threads < 1) throw std::invalid_argument("an update needs at least one thread");
    const int states = job.state == Format::none ? 0
                       : job.rule == Rule::adam  ? ((job.flags & kAmsgrad) ? 3 : 2)
                       : job.rule == Rule::lamb  ? 2
                       : job.rule == Rule::sgd   ? ((job.flags & kMomentum) ? 1 : 0)
                                                 : 1;
    for (const Piece& piece : pieces) {
        if (piece.count < 0) throw std::invalid_argument("a piece has a negative number of elements");
        if (piece.count == 0) continue;
        bool there = piece.parameter != 0 && piece.gradient != 0 && (job.lowered == Format::none || piece.lowered != 0);
        for (int state = 0; state < states; ++state) {
            there = there && piece.state[state] != 0 && (job.state != Format::coded || piece.scale[state] != 0);
        }
        if (!there) throw std::invalid_argument("a tensor of a piece has no memory (address 0)");
    }
    refuse_overlaps(ranges_of(job, pieces));
}

// Calls `act(begin, end)` with the memory of each tensor of a part that an update reads and writes.
template <class Act>
void each_updated(const Job& job, const Piece& piece, const Part& part, Act act) {
    const auto span = [&](std::uint64_t address, std::int64_t bytes) {
        if (address != 0) act(address + part.begin * bytes, address + part.end * bytes);
    };
    span(piece.parameter, width(job.parameter));
    for (int state = 0; state < kMostStates; ++state) {
        span(piece.state[state], width(job.state));
        if (const std::uint64_t scales = piece.scale[state]) {
            act(scales + part.begin / kBlock * 4, scales + (part.end + kBlock - 1) / kBlock * 4);
        }
    }
}

PageSums page_sums(const std::vector<PageAddresses>& addresses) {
    std::vector<SummedPages> memory;
    for (const PageAddresses& a : addresses) {
        if (a[0] % kCrcPage) throw std::invalid_argument("checksums are of whole pages of 4096 bytes");
        if (a[1] == 0) continue;
        if (!a[0] || !a[2] || !a[3] || !a[4]) throw std::invalid_argument("checksums have no memory (address 0)");
        memory.push_back({a[0], a[1], reinterpret_cast<const std::uint32_t*>(a[2]),
                          reinterpret_cast<std::uint32_t*>(a[3]), reinterpret_cast<PageState*>(a[4])});
    }
    return PageSums(std::move(memory));
}

// Compares all pages that were not compared before.
void compare_pages(const PageAddresses& address) {
    page_sums({address}).inside(address[0], address[0] + address[1] * kCrcPage,
                                [](const SummedPages& memory, auto first, auto last) { memory.compare(first, last); });
}

void update(const std::string& instruction_set, int rule, unsigned flags, const std::vector<double>& numbers,
            const std::array<int, 4>& formats, const std::vector<Addresses>& addresses, double divisor,
            std::uint32_t seed, int threads, const std::vector<PageAddresses>& summed) {
    const InstructionSet& set = find(instruction_set);
    const Job job = {static_cast<Rule>(rule), static_cast<Format>(formats[0]), static_cast<Format>(formats[1]),
                     static_cast<Format>(formats[2]), static_cast<Format>(formats[3]), flags,
                     static_cast<float>(divisor), seed, numbers.data()};
    std::vector<Piece> pieces;
    for (const Addresses& a : addresses) {
        pieces.push_back({a[1], a[2], a[3], {a[4], a[5], a[6]}, {a[7], a[8], a[9]}, static_cast<std::int64_t>(a[0])});
    }
    check(job, pieces, numbers.size(), threads);
    const PageSums sums = page_sums(summed);
    const auto compare = [](const SummedPages& memory, auto first, auto last) { memory.compare(first, last); };
    const auto renew = [](const SummedPages& memory, auto first, auto last) { memory.renew(first, last); };
    const std::vector<Part> parts = cut(pieces, threads, !sums.empty());
    // Pages that several parts or tensors share: compared before any of them is updated, and summed after all are.
    const auto at_edges = [&](auto act) {
        for (const Part& part : parts) {
            if (sums.empty()) break;
            each_updated(job, pieces[part.piece], part, [&](std::uint64_t begin, std::uint64_t end) {
                if (begin % kCrcPage) sums.around(begin, act);
                if (end % kCrcPage) sums.around(end, act);
            });
        }
    };
    at_edges(compare);
    std::vector<float> ratios(pieces.size(), 1.0f);
    if (job.rule == Rule::lamb) ratios = trust_ratios(set, job, pieces, parts, threads);
    run_in_team(threads, static_cast<int>(parts.size()), [&](int number) {
        const Part& part = parts[number];
        const Piece& piece = pieces[part.piece];
        const auto whole = [&](auto act) {
            each_updated(job, piece, part, [&](auto begin, auto end) { sums.inside(begin, end, act); });
        };
        whole(compare);  // brings the pages into the cache
        set.update(job, piece, part.begin, part.end, ratios[part.piece]);
        whole(renew);
    });
    at_edges(renew);
}

// Requests huge pages for memory that was not written to yet; ignored by systems without them.
void prefer_huge_pages(std::uint64_t address, std::uint64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr std::uint64_t page = 4096;
    const std::uint64_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(static_cast<std::uintptr_t>(begin)), end - begin, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

}  // namespace
}  // namespace windlass

NB_MODULE(_optimizers, m) {
    nb::set_leak_warnings(false);
    m.doc() = "Optimizer updates on raw addresses; call them through windlass.kernels.kernel_dispatch.";
    m.def("instruction_sets", &windlass::instruction_sets);
    m.def("update", &windlass::update, nb::arg("instruction_set"), nb::arg("rule"), nb::arg("flags"),
          nb::arg("numbers"), nb::arg("formats"), nb::arg("addresses"), nb::arg("divisor"), nb::arg("seed"),
          nb::arg("threads"), nb::arg("summed") = std::vector<windlass::PageAddresses>(),
          nb::call_guard<nb::gil_scoped_release>());
    m.def("compare_pages", &windlass::compare_pages, nb::arg("address"), nb::call_guard<nb::gil_scoped_release>());
    m.def("prefer_huge_pages", &windlass::prefer_huge_pages, nb::arg("address"), nb::arg("bytes"));
}
