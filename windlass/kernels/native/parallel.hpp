// Parallel loops on the threads that torch uses, where those can be found.
#pragma once

#include <functional>

namespace windlass {

// Calls `part(0)` to `part(parts - 1)`, each once, on at most `threads` threads, the caller's among them; returns when
// all are done. `part` must not throw. Threads take parts in order, as soon as they are free.
void run_parallel(int threads, int parts, const std::function<void(int)>& part);

}  // namespace windlass
