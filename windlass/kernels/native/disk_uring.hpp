// I/O engine with io_uring: one thread keeps `depth` blocks in flight and otherwise sleeps in the kernel.
#pragma once

#include <sys/eventfd.h>

#include <future>
#include <map>
#include <string>

#include "disk_memory.hpp"
#include "disk_ring.hpp"
#include "disk_threads.hpp"

namespace windlass::disk {

class Uring {
 public:
    // Raises std::system_error if the kernel refuses io_uring.
    Uring(std::vector<int> files, unsigned depth, uint64_t largest, uint64_t alignment)
        : files_(std::move(files)), slots_(depth), largest_(largest), alignment_(alignment) {
        wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (wake_ < 0) throw std::system_error(errno, std::system_category(), "eventfd");
        std::promise<void> started;
        auto ready = started.get_future();
        {
            NoSignals guard;
            thread_ = std::thread([this, &started] { run(started); });
        }
        try {
            ready.get();
        } catch (...) {
            thread_.join();
            ::close(wake_);
            throw;
        }
    }
    ~Uring() { ::close(wake_); }
    Uring(const Uring&) = delete;
    Uring& operator=(const Uring&) = delete;

    void close() {
        queue.stop(ECANCELED);
        wake();
        if (thread_.joinable()) thread_.join();
    }

    void wake() {
        const uint64_t one = 1;
        while (::write(wake_, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    // Registers memory with the kernel, which then need not look up its pages for each block. Returns the region's
    // number, or -errno (ENOMEM: more locked memory than `ulimit -l` allows).
    int add_region(uint64_t address, uint64_t bytes) {
        std::promise<int> answer;
        auto found = answer.get_future();
        post({address, bytes, -1, &answer});
        return found.get();
    }

    // Once this returns, no new block uses the region, so that other memory may be allocated at the same address.
    void remove_region(int place) {
        {
            std::lock_guard lock(regions_mutex_);
            std::erase_if(regions_, [place](const auto& entry) { return entry.second.place == place; });
        }
        post({0, 0, place, nullptr});
    }

    Queue queue;

 private:
    static constexpr unsigned kRegions = 1024;
    static constexpr uint64_t kWake = UINT64_MAX;

    struct Slot {
        Job job;
        char* memory = nullptr;
        uint64_t done = 0;
        Bounce bounce;
    };

    struct Region {
        uint64_t address, bytes;
        int place;                   // entry of the kernel's table; -1: to be chosen, or to be removed if bytes is 0
        std::promise<int>* answer;
    };

    // Request short time slices: this thread runs for microseconds, and is then scheduled sooner beside computing
    // threads. Linux 6.12 and newer support it; elsewhere blocks wait a little longer.
    static void run_briefly() {
#ifdef SYS_sched_getattr
        struct {
            uint32_t size, policy;
            uint64_t flags;
            int32_t nice;
            uint32_t priority;
            uint64_t runtime, deadline, period;
        } attributes{};
        if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) == 0 && attributes.policy == 0) {
            attributes.runtime = 100'000;  // nanoseconds
            syscall(SYS_sched_setattr, 0, &attributes, 0);
        }
#endif
    }

    void run(std::promise<void>& started) {
        run_briefly();
        std::unique_ptr<Ring> ring;
        try {
            ring = std::make_unique<Ring>(static_cast<unsigned>(slots_.size()) + 1);
            ring->register_files(files_);
        } catch (...) {
            started.set_exception(std::current_exception());
            return;
        }
        if (ring->reserve_buffers(kRegions)) {
            for (int place = kRegions; place-- > 0;) free_places_.push_back(place);
        }
        for (unsigned i = 0; i < slots_.size(); ++i) free_slots_.push_back(i);
        started.set_value();
        ring_ = ring.get();
        listen();
        try {
            while (!(queue.stopped() && free_slots_.size() == slots_.size())) turn();
            refuse_regions();
        } catch (const std::system_error& error) {
            abandon(error.code().value());
        }
    }

    void turn() {
        settle_regions();
        fill();
        ring_->submit_and_wait();
        ring_->completions([this](uint64_t what, int result) {
            if (what == kWake) return heard();
            completed(static_cast<unsigned>(what), result);
        });
    }

    // The eventfd is polled, not read through the ring: a read in flight when the ring closes would write to freed
    // memory.
    void listen() {
        abi::Sqe& entry = ring_->entry();
        entry.opcode = abi::kOpPoll;
        entry.fd = wake_;
        entry.rw_flags = abi::kPollIn;
        entry.user_data = kWake;
    }

    void heard() {
        uint64_t times;
        while (::read(wake_, &times, sizeof times) < 0 && errno == EINTR) {
        }
        listen();
    }

    void fill() {
        while (!free_slots_.empty()) {
            auto job = queue.take();
            if (!job) return;
            Slot& slot = slots_[free_slots_.back()];
            try {
                slot.memory = slot.bounce.lend(job->block, job->request->write, alignment_, largest_);
            } catch (const std::bad_alloc&) {
                queue.finish(*job, ENOMEM, 0);
                continue;
            }
            slot.job = std::move(*job);
            slot.done = 0;
            const bool write = slot.job.request->write;
            note_sums(slot.job.block, write);
            start(free_slots_.back());
            free_slots_.pop_back();
            if (write) ring_->submit();  // the disk works while the checksums of the next block are computed
        }
    }

    void start(unsigned number) {
        const Slot& slot = slots_[number];
        const bool write = slot.job.request->write;
        const uint64_t address = reinterpret_cast<uint64_t>(slot.memory) + slot.done;
        const uint64_t left = slot.job.block.bytes - slot.done;
        const int region = region_of(address, left);
        abi::Sqe& entry = ring_->entry();
        entry.opcode = region < 0 ? (write ? abi::kOpWrite : abi::kOpRead)
                                  : (write ? abi::kOpWriteFixed : abi::kOpReadFixed);
        entry.flags = abi::kFixedFile;
        entry.fd = static_cast<int32_t>(slot.job.block.file);
        entry.offset = slot.job.block.offset + slot.done;
        entry.address = address;
        entry.length = static_cast<uint32_t>(left);
        entry.buffer_index = region < 0 ? 0 : static_cast<uint16_t>(region);
        entry.user_data = number;
    }

    void completed(unsigned number, int result) {
        Slot& slot = slots_[number];
        if (result == -EAGAIN || result == -EINTR) return start(number);
        int error = 0;
        if (result < 0) {
            error = -result;
        } else {
            slot.done += static_cast<uint64_t>(result);
            if (slot.done < slot.job.block.bytes) {
                // Direct I/O is short within a page only at the end of the file.
                if (result > 0 && slot.done % kPage == 0) return start(number);
                error = ENODATA;
            }
        }
        const bool write = slot.job.request->write;
        if (!error) {
            slot.done = undamaged(slot.job.block, write, slot.memory);
            error = slot.done < slot.job.block.bytes ? EBADMSG : 0;
        }
        if (!error) slot.bounce.give_back(slot.job.block, write);
        free_slots_.push_back(number);
        queue.finish(std::exchange(slot.job, {}), error, slot.done);
    }

    void post(Region region) {
        {
            std::lock_guard lock(regions_mutex_);
            if (!ended_) {
                posted_.push_back(region);
                region.answer = nullptr;
            }
        }
        if (region.answer) region.answer->set_value(-ECANCELED);
        wake();
    }

    void settle_regions() {
        std::vector<Region> posted;
        {
            std::lock_guard lock(regions_mutex_);
            posted.swap(posted_);
        }
        for (const Region& region : posted) {
            if (region.bytes) {
                region.answer->set_value(adopt(region));
            } else {
                forget(region.place);
            }
        }
    }

    int adopt(const Region& region) {
        if (free_places_.empty()) return -ENOSPC;
        const int place = free_places_.back();
        if (const int error = ring_->set_buffer(place, region.address, region.bytes)) return -error;
        free_places_.pop_back();
        std::lock_guard lock(regions_mutex_);
        regions_[region.address] = {region.address, region.bytes, place, nullptr};
        return place;
    }

    // Blocks in flight keep the region's pages pinned; the kernel unpins them when the last block is done.
    void forget(int place) {
        ring_->set_buffer(place, 0, 0);
        free_places_.push_back(place);
    }

    int region_of(uint64_t address, uint64_t bytes) {
        std::lock_guard lock(regions_mutex_);
        auto after = regions_.upper_bound(address);
        if (after == regions_.begin()) return -1;
        const Region& region = std::prev(after)->second;
        return address + bytes <= region.address + region.bytes ? region.place : -1;
    }

    void refuse_regions() {
        std::lock_guard lock(regions_mutex_);
        ended_ = true;
        for (const Region& region : std::exchange(posted_, {})) {
            if (region.answer) region.answer->set_value(-ECANCELED);
        }
    }

    // The ring itself failed: fail all waiting requests.
    void abandon(int error) {
        queue.stop(error);
        for (Slot& slot : slots_) {
            if (slot.job.request) queue.finish(std::exchange(slot.job, {}), error, slot.done);
        }
        refuse_regions();
    }

    std::vector<int> files_;
    std::vector<Slot> slots_;
    uint64_t largest_, alignment_;
    int wake_ = -1;
    Ring* ring_ = nullptr;
    std::vector<unsigned> free_slots_;
    std::vector<int> free_places_;

    std::mutex regions_mutex_;
    std::map<uint64_t, Region> regions_;  // regions by address
    std::vector<Region> posted_;
    bool ended_ = false;
    std::thread thread_;
};

}  // namespace windlass::disk
