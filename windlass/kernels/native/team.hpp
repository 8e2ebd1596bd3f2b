// Threads that wait for work: one team for the process, made when it is first needed.
#pragma once

#include <functional>

namespace windlass {

// Calls `part(0)` to `part(parts - 1)`, each once, on at most `threads` threads, the caller's among them; returns when
// all are done. `part` must not throw. Fewer threads do the work if the system grants no more.
void run_in_team(int threads, int parts, const std::function<void(int)>& part);

}  // namespace windlass
