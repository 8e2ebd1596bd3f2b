// The two rings that an io_uring shares with the kernel: set up, mapped, filled and read by one thread.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <vector>

#include "disk_abi.hpp"

namespace windlass::disk {

// Failures raise std::system_error with the system's errno. All members are called by the thread that constructed the
// ring: the kernel then needs no locks, and completions run on this thread instead of interrupting the computing one.
class Ring {
 public:
    explicit Ring(unsigned entries) {
        open(entries);
        check_operations();
        map();
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    void register_files(std::vector<int>& files) {
        if (abi::control(fd_.number, abi::kRegisterFiles, files.data(), static_cast<unsigned>(files.size())) < 0) {
            fail("registering files");
        }
    }

    // Allocates a table of `count` buffers; false if the kernel (before 5.19) has no such table.
    bool reserve_buffers(unsigned count) {
        abi::ResourceRegister table{count, abi::kSparse, 0, 0, 0};
        return abi::control(fd_.number, abi::kRegisterBuffers2, &table, sizeof table) == 0;
    }

    // Sets an entry of the table. Returns 0 or the errno. Address 0 clears the entry.
    int set_buffer(unsigned place, uint64_t address, uint64_t bytes) {
        uint64_t vector[2] = {address, bytes};  // an iovec
        abi::ResourceUpdate update{place, 0, reinterpret_cast<uint64_t>(vector), 0, 1, 0};
        return abi::control(fd_.number, abi::kUpdateBuffers, &update, sizeof update) < 0 ? errno : 0;
    }

    // Returns a cleared submission entry; the caller never requests more than the ring has.
    abi::Sqe& entry() {
        const uint32_t tail = sq_tail_->load(std::memory_order_relaxed);
        const uint32_t index = tail & sq_mask_;
        sq_array_[index] = index;
        sqes_at(index) = {};
        sq_tail_->store(tail + 1, std::memory_order_release);
        ++unsubmitted_;
        return sqes_at(index);
    }

    // Submits the entries without waiting.
    void submit() { hand_over(0, 0); }

    // Submits the entries and sleeps until an operation completes.
    void submit_and_wait() { hand_over(1, abi::kGetEvents); }
    template <typename Take>
    void completions(Take take) {
        uint32_t head = cq_head_->load(std::memory_order_relaxed);
        while (head != cq_tail_->load(std::memory_order_acquire)) {
            const abi::Cqe found = cqes_[head & cq_mask_];
            cq_head_->store(++head, std::memory_order_release);
            take(found.user_data, found.result);
        }
    }

 private:
    struct Descriptor {
        ~Descriptor() {
            if (number >= 0) ::close(number);
        }
        int number = -1;
    };

    struct Mapping {
        void map(int fd, uint64_t offset) {
            constexpr int kShared = MAP_SHARED | MAP_POPULATE;
            at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kShared, fd, static_cast<off_t>(offset));
        }
        ~Mapping() {
            if (at != MAP_FAILED) munmap(at, bytes);
        }
        void* at = MAP_FAILED;
        size_t bytes = 0;
    };

    using Index = std::atomic<uint32_t>;
    static_assert(sizeof(Index) == 4 && Index::is_always_lock_free);

    [[noreturn]] static void fail(const char* what) { throw std::system_error(errno, std::system_category(), what); }

    void hand_over(unsigned wait_for, unsigned flags) {
        const int taken = abi::enter(fd_.number, unsubmitted_, wait_for, flags);
        if (taken >= 0) {
            unsubmitted_ -= static_cast<unsigned>(taken);
        } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
            fail("io_uring_enter");
        }
    }

    void open(unsigned entries) {
        params_.flags = abi::kSingleIssuer | abi::kDeferTaskrun;
        fd_.number = abi::setup(entries, &params_);
        if (fd_.number < 0 && errno == EINVAL) {  // a kernel before 6.1
            params_ = {};
            fd_.number = abi::setup(entries, &params_);
        }
        if (fd_.number < 0) fail("io_uring_setup");
    }

    void check_operations() {
        abi::Probe probe{};
        const bool told = abi::control(fd_.number, abi::kRegisterProbe, &probe, 64) == 0;
        const bool all = told && (probe.ops[abi::kOpRead].flags & abi::kOpSupported) &&
                         (probe.ops[abi::kOpWrite].flags & abi::kOpSupported) && (params_.features & abi::kSingleMmap);
        if (!all) {
            errno = ENOSYS;
            fail("this kernel's io_uring is too old");
        }
    }

    void map() {
        rings_.bytes = std::max<size_t>(params_.sq.array + params_.sq_entries * sizeof(uint32_t),
                                        params_.cq.cqes + params_.cq_entries * sizeof(abi::Cqe));
        sqes_.bytes = params_.sq_entries * sizeof(abi::Sqe);
        rings_.map(fd_.number, abi::kSqRing);
        sqes_.map(fd_.number, abi::kSqes);
        if (rings_.at == MAP_FAILED || sqes_.at == MAP_FAILED) fail("mapping the rings");
        char* base = static_cast<char*>(rings_.at);
        sq_tail_ = reinterpret_cast<Index*>(base + params_.sq.tail);
        sq_array_ = reinterpret_cast<uint32_t*>(base + params_.sq.array);
        sq_mask_ = *reinterpret_cast<uint32_t*>(base + params_.sq.ring_mask);
        cq_head_ = reinterpret_cast<Index*>(base + params_.cq.head);
        cq_tail_ = reinterpret_cast<Index*>(base + params_.cq.tail);
        cq_mask_ = *reinterpret_cast<uint32_t*>(base + params_.cq.ring_mask);
        cqes_ = reinterpret_cast<abi::Cqe*>(base + params_.cq.cqes);
    }

    abi::Sqe& sqes_at(uint32_t index) { return static_cast<abi::Sqe*>(sqes_.at)[index]; }

    abi::Params params_{};
    Descriptor fd_;
    Mapping rings_, sqes_;
    Index *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t *sq_array_ = nullptr, sq_mask_ = 0, cq_mask_ = 0;
    abi::Cqe* cqes_ = nullptr;
    unsigned unsubmitted_ = 0;
};

}  // namespace windlass::disk
