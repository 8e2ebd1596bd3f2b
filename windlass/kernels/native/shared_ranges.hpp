// Ranges of items that threads share.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace windlass {

// Consecutive items, divided into a range for each thread. A thread takes pieces from the front of its range and then
// from the ends of the others' ranges. So it reads memory in order, and a delayed thread leaves its items to the others.
class SharedRanges {
   public:
    static constexpr int kMost = 64;

    // First item of a range. Ranges have multiples of `unit` items; the last one also has the rest.
    static std::int64_t first_item(std::int64_t items, std::int64_t unit, int ranges, int number) {
        return number == ranges ? items : items / unit * number / ranges * unit;
    }

    // Divides fewer than 2^32 items into at most kMost ranges, before any thread calls `take_all`.
    void divide(std::int64_t items, std::int64_t unit, int ranges) {
        count_ = ranges;
        for (int i = 0; i < ranges; ++i) {
            ranges_[i].left.store(joined(first_item(items, unit, ranges, i), first_item(items, unit, ranges, i + 1)),
                                  std::memory_order_relaxed);
        }
    }

    // Calls `use(begin, end)` for pieces of at most `piece` items, a multiple of the unit, until all are taken.
    template <class Use>
    void take_all(int own, std::int64_t piece, const Use& use) {
        std::int64_t begin = 0, end = 0;
        for (int i = 0; i < count_; ++i) {
            Range& range = ranges_[(own + i) % count_];
            while (take(range, piece, i == 0, begin, end)) use(begin, end);
        }
    }

   private:
    struct alignas(64) Range {
        std::atomic<std::uint64_t> left{0};  // first item << 32 | end
    };

    static std::uint64_t joined(std::int64_t begin, std::int64_t end) {
        return static_cast<std::uint64_t>(begin) << 32 | static_cast<std::uint64_t>(end);
    }

    static bool take(Range& range, std::int64_t piece, bool from_front, std::int64_t& begin, std::int64_t& end) {
        std::uint64_t seen = range.left.load(std::memory_order_relaxed);
        for (;;) {
            const auto first = static_cast<std::int64_t>(seen >> 32), last = static_cast<std::int64_t>(seen & 0xffffffffu);
            if (first >= last) return false;
            begin = from_front ? first : std::max(first, (last - 1) / piece * piece);
            end = from_front ? std::min(last, first + piece) : last;
            const std::uint64_t rest = from_front ? joined(end, last) : joined(first, begin);
            if (range.left.compare_exchange_weak(seen, rest, std::memory_order_relaxed)) return true;
        }
    }

    std::array<Range, kMost> ranges_;
    int count_ = 0;
};

}  // namespace windlass
