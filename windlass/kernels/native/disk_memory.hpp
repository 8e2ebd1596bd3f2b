// Aligned memory through which a block passes when its own does not suit direct I/O.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "crc32c.hpp"
#include "disk_queue.hpp"

namespace windlass::disk {

inline constexpr uint64_t kPage = kCrcPage;

// Before a write: note the checksums of what is meant to be written, whatever comes to lie on the disk.
inline void note_sums(const Block& block, bool write) {
    if (!write || block.sums == 0) return;
    crc_write(reinterpret_cast<const char*>(block.address), block.bytes / kPage, reinterpret_cast<uint32_t*>(block.sums));
}

// After a read into `memory`: how many bytes come before the first page that is not what was written, all if none is.
inline uint64_t undamaged(const Block& block, bool write, const char* memory) {
    if (write || block.sums == 0) return block.bytes;
    return kPage * crc_first_wrong(memory, block.bytes / kPage, reinterpret_cast<const uint32_t*>(block.sums));
}

// One such buffer, made at its first use: aligned programs never pay for it.
class Bounce {
 public:
    // Where the I/O of `block` is to happen: its own memory if that is aligned, else this, filled if it is a write.
    char* lend(const Block& block, bool write, uint64_t alignment, uint64_t largest) {
        char* own = reinterpret_cast<char*>(block.address);
        used_ = block.address % alignment != 0;
        if (!used_) return own;
        if (!memory_) memory_.reset(static_cast<char*>(std::aligned_alloc(kPage, largest)));
        if (!memory_) throw std::bad_alloc();
        if (write) std::memcpy(memory_.get(), own, block.bytes);
        return memory_.get();
    }

    // After a read: bring the bytes to where they belong.
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
