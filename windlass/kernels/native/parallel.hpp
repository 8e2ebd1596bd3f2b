// Parallel loops on the threads that torch uses, where those can be found.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace windlass {

// Calls `part(0)` to `part(parts - 1)`, each once, on at most `threads` threads, the caller's among them; returns when
// all are done. `part` must not throw. Threads take parts in order, as soon as they are free.
void run_parallel(int threads, int parts, const std::function<void(int)>& part);

// `run_parallel` of one module, which another module calls in its place: each module has its own crew.
using ParallelLoop = void (*)(int threads, int parts, const std::function<void(int)>& part);

// y = x @ weight.T with `weight` of another module, for `rows` contiguous rows.
using ForeignProduct = void (*)(const void* weight, const void* x, void* y, std::int64_t rows, int threads,
                                ParallelLoop loop);

// Part of a packed weight that a thread reads first in a product: `panels` consecutive panels of `panel_bytes` bytes,
// which it reads side by side. No panels: the thread reads nothing, or the part is not known beforehand.
struct FirstPart {
    const char* begin = nullptr;
    std::int64_t panel_bytes = 0;
    int panels = 0;
};

// Returns the first part of `thread` in a ForeignProduct of `rows` rows on `threads` threads.
using FirstPartOf = FirstPart (*)(const void* weight, std::int64_t rows, int thread, int threads);

// Calls `lead` on this thread, while the other threads stay in one parallel region and take the parts of the calls of
// `run_parallel` in `lead`. So such a call begins within the time of a cache miss. Part i of a call, for each i below
// the number of threads, is reserved for thread i, unless that thread is late. `idle(i)` is called again and again on
// thread i while the thread has no parts (thread 0 is the caller); `idle` returns false if there is nothing to do, and
// must not throw. An exception of `lead` is thrown here.
void run_with_crew(int threads, const std::function<void()>& lead, const std::function<bool(int)>& idle);

// Divides `items` into consecutive parts of at most `most`, for `run_parallel`: part i is [bounds[i], bounds[i + 1]).
// Parts are multiples of `unit`, except the last ones, which may be a quarter of a unit of at least 4. Later parts are
// smaller, so that threads which began at different times, or were delayed, finish together.
void divide_guided(std::int64_t items, std::int64_t unit, int threads, std::int64_t most,
                   std::vector<std::int64_t>& bounds);

}  // namespace windlass
