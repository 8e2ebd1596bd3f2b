// Parallel loops on the OpenMP threads of torch. Threads of our own would compete with those for the processor: libgomp's
// spin for milliseconds after each of torch's operations.
#include "parallel.hpp"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#include "team.hpp"

namespace windlass {
namespace {

using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);

// torch loads libgomp for the whole process. Other OpenMP libraries lack this entry: then threads of our own are used.
Region find_region() {
    static const Region found = reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

// A forked child has none of this process's OpenMP threads, and would wait for them.
const pid_t process_of_loading = getpid();

struct Work {
    const std::function<void(int)>& part;
    const int parts;
    std::atomic<int> next{0};
};

void take_parts(void* argument) {
    auto& work = *static_cast<Work*>(argument);
    for (int number = work.next.fetch_add(1); number < work.parts; number = work.next.fetch_add(1)) work.part(number);
}

// [Note: thread pool of the kernels] A call publishes its work in two words. A thread without parts may be delayed
// between reading the words and taking a part; the part then belongs to a later call. So a part is run only if its
// number was taken from the words, and the leader replaces the words only when all parts are done.
struct Crew {
    const std::function<void()>& lead;
    const std::function<bool(int)>& idle;
    const int threads;
    const void* leader;  // mark of the leader's thread
    std::exception_ptr problem = nullptr;
    alignas(64) std::atomic<std::uint64_t> ticket{0};  // number of parts << 32 | next part
    alignas(64) std::atomic<std::uint64_t> kept{0};    // bit i: part i is reserved for thread i, and not begun
    alignas(64) std::atomic<int> done{0};
    const std::function<void(int)>* part = nullptr;  // written before the words, read after a part is taken
    alignas(64) std::atomic<bool> ended{false};
    std::atomic<int> arrived{0};

    void run(int number) {
        (*part)(number);
        done.fetch_add(1, std::memory_order_release);
    }

    bool take_kept(std::uint64_t bit, int number) {
        if ((kept.load(std::memory_order_relaxed) & bit) == 0) return false;
        if ((kept.fetch_and(~bit, std::memory_order_acq_rel) & bit) == 0) return false;
        run(number);
        return true;
    }

    // Returns false if there was no part left to take.
    bool take(int thread) {
        bool any = thread < 64 && take_kept(std::uint64_t{1} << thread, thread);
        for (;;) {
            const std::uint64_t seen = ticket.load(std::memory_order_relaxed);
            if (static_cast<std::uint32_t>(seen) >= seen >> 32) break;
            const std::uint64_t taken = ticket.fetch_add(1, std::memory_order_acq_rel);
            if (static_cast<std::uint32_t>(taken) >= taken >> 32) break;
            run(static_cast<int>(static_cast<std::uint32_t>(taken)));
            any = true;
        }
        // The threads for which these parts are reserved are late.
        for (std::uint64_t left = kept.load(std::memory_order_relaxed); left != 0; left &= left - 1) {
            any = take_kept(left & -left, __builtin_ctzll(left)) || any;
        }
        return any;
    }

    void publish(int parts, const std::function<void(int)>& work) {
        const int first = std::min({parts, threads, 64});
        part = &work;
        done.store(0, std::memory_order_relaxed);
        ticket.store(static_cast<std::uint64_t>(parts) << 32 | static_cast<std::uint64_t>(first),
                     std::memory_order_release);
        kept.store(first == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << first) - 1, std::memory_order_release);
    }
};

// Waits a moment; after many moments yields the processor to other threads.
struct Patience {
    int moments = 0;

    void wait() {
        if (++moments >= 2000) {
            sched_yield();
            return;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");
#endif
    }
};

thread_local Crew* led = nullptr;  // crew that this thread leads
thread_local char mark;

void lead_crew(Crew& crew) {
    led = &crew;
    try {
        crew.lead();
    } catch (...) {
        crew.problem = std::current_exception();
    }
    led = nullptr;
    crew.ended.store(true, std::memory_order_release);
}

void join_crew(void* argument) {
    Crew& crew = *static_cast<Crew*>(argument);
    if (crew.leader == &mark) return lead_crew(crew);
    const int thread = crew.arrived.fetch_add(1) + 1;
    Patience patience;
    while (!crew.ended.load(std::memory_order_acquire)) {
        if (crew.take(thread) || crew.idle(thread)) {
            patience.moments = 0;
        } else {
            patience.wait();
        }
    }
}

void run_in_crew(Crew& crew, int parts, const std::function<void(int)>& part) {
    crew.publish(parts, part);
    crew.take(0);
    Patience patience;
    while (crew.done.load(std::memory_order_acquire) != parts) {
        if (!crew.idle(0)) patience.wait();
    }
}

}  // namespace

void run_with_crew(int threads, const std::function<void()>& lead, const std::function<bool(int)>& idle) {
    const Region region = find_region();
    if (threads <= 1 || region == nullptr || getpid() != process_of_loading || led != nullptr) {
        lead();
        return;
    }
    Crew crew{lead, idle, threads, &mark};
    region(join_crew, &crew, static_cast<unsigned>(threads), 0);
    if (crew.problem != nullptr) std::rethrow_exception(crew.problem);
}

void run_parallel(int threads, int parts, const std::function<void(int)>& part) {
    const int used = threads < parts ? threads : parts;
    if (used <= 1) {
        for (int number = 0; number < parts; ++number) part(number);
        return;
    }
    if (led != nullptr) {
        run_in_crew(*led, parts, part);
        return;
    }
    const Region region = find_region();
    if (region == nullptr || getpid() != process_of_loading) {
        run_in_team(used, parts, part);
        return;
    }
    Work work{part, parts};
    region(take_parts, &work, static_cast<unsigned>(used), 0);
}

void divide_guided(std::int64_t items, std::int64_t unit, int threads, std::int64_t most,
                   std::vector<std::int64_t>& bounds) {
    constexpr std::int64_t kPartsOfThread = 8;  // least parts: a delayed thread leaves its parts to the others
    const std::int64_t least = unit < 4 ? unit : unit / 4;
    const std::int64_t largest = std::clamp(items / (threads * kPartsOfThread), unit, std::max(most, unit));
    bounds.assign(1, 0);
    while (bounds.back() < items) {
        const std::int64_t left = items - bounds.back();
        std::int64_t size = threads == 1 ? largest : std::clamp(left / (2 * threads), least, largest);
        size -= size % (size < unit ? least : unit);
        bounds.push_back(bounds.back() + std::min(size, left));
    }
}

}  // namespace windlass
