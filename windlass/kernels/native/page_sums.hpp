// Checksums of pages that an update reads and writes, computed while the pages are in the cache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "crc32c.hpp"

namespace windlass {

enum class PageState : std::uint8_t { unread = 0, intact = 1, damaged = 2 };

// Whole pages that were read from a disk and will be written to it. `expected` are their checksums when they were written,
// `renewed` receives those of the new contents, `states` the results of the comparison. One entry a page each.
struct SummedPages {
    std::uint64_t address, count;
    const std::uint32_t* expected;
    std::uint32_t* renewed;
    PageState* states;

    std::uint64_t end() const { return address + count * kCrcPage; }
    const char* page(std::uint64_t number) const { return reinterpret_cast<const char*>(address + number * kCrcPage); }

    // Compares those pages of [first, last) that were not compared before; `renewed` becomes their checksum.
    void compare(std::uint64_t first, std::uint64_t last) const {
        for (std::uint64_t at = first; at < last; ++at) {
            if (states[at] != PageState::unread) continue;
            std::uint64_t stop = at + 1;
            while (stop < last && states[stop] == PageState::unread) ++stop;
            renew(at, stop);
            for (; at < stop; ++at) states[at] = renewed[at] == expected[at] ? PageState::intact : PageState::damaged;
        }
    }

    void renew(std::uint64_t first, std::uint64_t last) const { crc_write(page(first), last - first, renewed + first); }
};

// Pages of all memory that one update may change.
class PageSums {
 public:
    explicit PageSums(std::vector<SummedPages> memory) : memory_(std::move(memory)) {
        std::sort(memory_.begin(), memory_.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
    }

    bool empty() const { return memory_.empty(); }

    // Calls `act(memory, first, last)` with the whole pages inside of [begin, end), if there are any.
    template <class Act>
    void inside(std::uint64_t begin, std::uint64_t end, Act act) const {
        const SummedPages* memory = find(begin);
        if (memory == nullptr) return;
        const std::uint64_t first = (begin - memory->address + kCrcPage - 1) / kCrcPage;
        const std::uint64_t last = (std::min(end, memory->end()) - memory->address) / kCrcPage;
        if (first < last) act(*memory, first, last);
    }

    // Calls `act(memory, page, page + 1)` with the page that contains `address`, if there is one.
    template <class Act>
    void around(std::uint64_t address, Act act) const {
        if (const SummedPages* memory = find(address)) {
            const std::uint64_t page = (address - memory->address) / kCrcPage;
            act(*memory, page, page + 1);
        }
    }

 private:
    const SummedPages* find(std::uint64_t address) const {
        const auto after = std::upper_bound(memory_.begin(), memory_.end(), address,
                                            [](std::uint64_t at, const SummedPages& one) { return at < one.address; });
        if (after == memory_.begin() || address >= std::prev(after)->end()) return nullptr;
        return &*std::prev(after);
    }

    std::vector<SummedPages> memory_;
};

}  // namespace windlass
