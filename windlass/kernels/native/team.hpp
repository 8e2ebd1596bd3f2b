// Threads that wait for work: one team per process, created at its first use.
#pragma once

#include <functional>

namespace windlass {

// Calls `part(0)` to `part(parts - 1)`, each once, on at most `threads` threads, including the caller; returns when all
// are done. `part` must not throw. If the system grants fewer threads, fewer do the work.
void run_in_team(int threads, int parts, const std::function<void(int)>& part);

}  // namespace windlass
