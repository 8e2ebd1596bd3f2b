// Aligned bounce buffer for a block whose own memory does not meet the alignment of direct I/O.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "crc32c.hpp"
#include "disk_queue.hpp"

namespace windlass::disk {

inline constexpr uint64_t kPage = kCrcPage;

// Before a write: record the checksums of the bytes to be written.
inline void note_sums(const Block& block, bool write) {
    if (!write || block.sums == 0) return;
    crc_write(reinterpret_cast<const char*>(block.address), block.bytes / kPage, reinterpret_cast<uint32_t*>(block.sums));
}

// After a read into `memory`: returns the number of bytes before the first page that differs from the written page; all
// bytes of the block if no page differs.
inline uint64_t undamaged(const Block& block, bool write, const char* memory) {
    if (write || block.sums == 0) return block.bytes;
    return kPage * crc_first_wrong(memory, block.bytes / kPage, reinterpret_cast<const uint32_t*>(block.sums));
}

// Bounce buffer, allocated at its first use, so that aligned transfers need none.
class Bounce {
 public:
    // Returns the memory for the I/O of `block`: its own if aligned, else the bounce buffer, filled for a write.
    char* lend(const Block& block, bool write, uint64_t alignment, uint64_t largest) {
        char* own = reinterpret_cast<char*>(block.address);
        used_ = block.address % alignment != 0;
        if (!used_) return own;
        if (!memory_) memory_.reset(static_cast<char*>(std::aligned_alloc(kPage, largest)));
        if (!memory_) throw std::bad_alloc();
        if (write) std::memcpy(memory_.get(), own, block.bytes);
        return memory_.get();
    }

    // After a read: copy the bytes to the block's memory.
    void give_back(const Block& block, bool write) const {
        if (used_ && !write) std::memcpy(reinterpret_cast<char*>(block.address), memory_.get(), block.bytes);
    }

 private:
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    bool used_ = false;
};

}  // namespace windlass::disk
