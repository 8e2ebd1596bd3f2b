// Parallel loops on the OpenMP threads of torch. Threads of our own would compete with those for the processor: libgomp's
// spin for milliseconds after each of torch's operations.
#include "parallel.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "team.hpp"

namespace windlass {
namespace {

using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);

// torch loads libgomp for the whole process. Other OpenMP libraries lack this entry: there, threads of our own wait.
Region find_region() {
    static const Region found = reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

// A child of this process has none of its OpenMP threads, and would wait for them.
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

}  // namespace

void run_parallel(int threads, int parts, const std::function<void(int)>& part) {
    const int used = threads < parts ? threads : parts;
    if (used <= 1) {
        for (int number = 0; number < parts; ++number) part(number);
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
    constexpr std::int64_t kPartsOfThread = 8;  // at least: a thread that is held up leaves its parts to others
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
