// Requests of the disk tier, split into queued blocks; shared by both I/O engines.
#pragma once

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace windlass::disk {

// A span of one file and the memory it comes from or goes to. `offset` and `bytes` are aligned for direct I/O,
// `address` may not be. `sums` is the address of one checksum a page: set by a write, compared by a read; 0: there are
// none.
struct Block {
    uint32_t file;
    uint64_t offset, address, bytes, sums;
};

// A failed block: the system's error and the bytes done. ENODATA: the file ended before the end of the block. EBADMSG:
// the page after `done` differs from the written one.
struct Failure {
    int error;
    uint32_t file;
    uint64_t offset, done;
};

// Blocks of one call. Done when none of its blocks is queued or in flight, also after a failure.
struct Request {
    bool write;
    uint64_t blocks_left;
    std::optional<Failure> failure;  // the first one; blocks not started by then are cancelled
};

using RequestPtr = std::shared_ptr<Request>;

struct Job {
    RequestPtr request;
    Block block;
};

// Bytes transferred so far, and seconds during which reads, writes, or either were outstanding.
struct Counters {
    uint64_t read_bytes = 0, write_bytes = 0;
    double read_seconds = 0, write_seconds = 0, busy_seconds = 0;
};

// Stopwatch that runs while at least one operation is outstanding.
class Busy {
 public:
    void begin() {
        if (outstanding_++ == 0) since_ = Clock::now();
    }
    void end() {
        if (--outstanding_ == 0) total_ += elapsed();
    }
    double seconds() const { return outstanding_ ? total_ + elapsed() : total_; }

 private:
    using Clock = std::chrono::steady_clock;
    double elapsed() const { return std::chrono::duration<double>(Clock::now() - since_).count(); }

    uint64_t outstanding_ = 0;
    double total_ = 0;
    Clock::time_point since_;
};

// Blocks in the order of their requests, alternating between reads and writes: a read that the step waits for is not
// queued behind gigabytes of writes, and writes, whose buffers are needed again, are not starved by reads.
class Queue {
 public:
    // Adds a request. Returns null once the queue is stopped.
    RequestPtr add(bool write, const std::vector<Block>& blocks) {
        auto request = std::make_shared<Request>(Request{write, blocks.size(), std::nullopt});
        std::lock_guard lock(mutex_);
        if (stopped_) return nullptr;
        if (blocks.empty()) return request;
        for (const Block& block : blocks) waiting_[write].push_back({request, block});
        busy_[write].begin();
        busy_[2].begin();
        work_.notify_all();
        return request;
    }

    // Returns the next block to start, if there is one.
    std::optional<Job> take() {
        std::lock_guard lock(mutex_);
        return next();
    }

    // Waits for the next block to start and returns it; returns nothing once the queue is stopped.
    std::optional<Job> await() {
        std::unique_lock lock(mutex_);
        for (;;) {
            if (auto job = next()) return job;
            if (stopped_) return std::nullopt;
            work_.wait(lock);
        }
    }

    void finish(const Job& job, int error, uint64_t done) {
        std::lock_guard lock(mutex_);
        (job.request->write ? moved_.write_bytes : moved_.read_bytes) += done;
        if (error && !job.request->failure) {
            job.request->failure = Failure{error, job.block.file, job.block.offset, done};
        }
        drop(job);
    }

    // Cancels queued blocks; blocks in flight continue. Nothing can be added afterwards.
    void stop(int error) {
        std::lock_guard lock(mutex_);
        stopped_ = true;
        for (auto& waiting : waiting_) {
            for (const Job& job : std::exchange(waiting, {})) {
                if (!job.request->failure) job.request->failure = Failure{error, job.block.file, job.block.offset, 0};
                drop(job);
            }
        }
        work_.notify_all();
    }

    bool stopped() const {
        std::lock_guard lock(mutex_);
        return stopped_;
    }

    bool done(const Request& request) const {
        std::lock_guard lock(mutex_);
        return request.blocks_left == 0;
    }

    bool wait(const Request& request, double seconds) const {
        std::unique_lock lock(mutex_);
        return done_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return request.blocks_left == 0; });
    }

    std::optional<Failure> failure(const Request& request) const {
        std::lock_guard lock(mutex_);
        return request.failure;
    }

    Counters counters() const {
        std::lock_guard lock(mutex_);
        Counters found = moved_;
        found.read_seconds = busy_[0].seconds();
        found.write_seconds = busy_[1].seconds();
        found.busy_seconds = busy_[2].seconds();
        return found;
    }

 private:
    std::optional<Job> next() {
        while (!waiting_[0].empty() || !waiting_[1].empty()) {
            turn_ = waiting_[!turn_].empty() ? turn_ : !turn_;
            Job job = std::move(waiting_[turn_].front());
            waiting_[turn_].pop_front();
            if (!job.request->failure) return job;
            drop(job);
        }
        return std::nullopt;
    }

    void drop(const Job& job) {
        if (--job.request->blocks_left) return;
        busy_[job.request->write].end();
        busy_[2].end();
        done_.notify_all();
    }

    mutable std::mutex mutex_;
    mutable std::condition_variable done_;
    std::condition_variable work_;
    std::deque<Job> waiting_[2];  // reads, writes
    Busy busy_[3];                // reads, writes, either
    Counters moved_;
    bool turn_ = false;
    bool stopped_ = false;
};

}  // namespace windlass::disk
