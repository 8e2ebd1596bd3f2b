// I/O engine for systems that refuse io_uring: a few threads, each with one pread or pwrite at a time.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "disk_memory.hpp"

namespace windlass::disk {

// Python's main thread handles signals, so threads started in this scope block all of them.
class NoSignals {
 public:
    NoSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    NoSignals(const NoSignals&) = delete;
    NoSignals& operator=(const NoSignals&) = delete;

 private:
    sigset_t before_;
};

class Threads {
 public:
    Threads(std::vector<int> files, unsigned count, uint64_t largest, uint64_t alignment)
        : files_(std::move(files)), largest_(largest), alignment_(alignment) {
        NoSignals guard;
        for (unsigned i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
    }
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    void close() {
        queue.stop(ECANCELED);
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

    void wake() {}  // adding to the queue wakes a thread

    int add_region(uint64_t, uint64_t) { return -ENOTSUP; }
    void remove_region(int) {}

    Queue queue;

 private:
    void work() {
        Bounce bounce;
        while (auto job = queue.await()) {
            auto [error, done] = move(*job, bounce);
            queue.finish(*job, error, done);
        }
    }

    std::pair<int, uint64_t> move(const Job& job, Bounce& bounce) {
        const auto& [file, offset, address, bytes, sums] = job.block;
        const bool write = job.request->write;
        char* memory;
        try {
            memory = bounce.lend(job.block, write, alignment_, largest_);
        } catch (const std::bad_alloc&) {
            return {ENOMEM, 0};
        }
        note_sums(job.block, write);
        for (uint64_t done = 0; done < bytes;) {
            const uint64_t left = bytes - done;
            const auto at = static_cast<off_t>(offset + done);
            const ssize_t got = write ? pwrite(files_[file], memory + done, left, at)
                                      : pread(files_[file], memory + done, left, at);
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) return {errno, done};
            done += static_cast<uint64_t>(got);
            if (got == 0 || (done < bytes && done % kPage != 0)) return {ENODATA, done};
        }
        if (const uint64_t good = undamaged(job.block, write, memory); good < bytes) return {EBADMSG, good};
        bounce.give_back(job.block, write);
        return {0, bytes};
    }

    std::vector<int> files_;
    uint64_t largest_, alignment_;
    std::vector<std::thread> threads_;
};

}  // namespace windlass::disk
