// Threads that wait for work, in a process that may fork: a child starts its own team.
#include "team.hpp"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>

namespace windlass {
namespace {

struct Team {
    explicit Team(pid_t owner) : owner(owner) {}

    const pid_t owner;
    std::mutex turn;  // held by the caller whose work is running
    std::mutex lock;  // guards everything below
    std::condition_variable wake, done;
    const std::function<void(int)>* part = nullptr;
    std::atomic<int> next{0};
    int parts = 0, members = 0, wanted = 0, busy = 0;
    unsigned long round = 0;
};

void take_parts(Team& team) {
    for (int number = team.next.fetch_add(1); number < team.parts; number = team.next.fetch_add(1)) {
        (*team.part)(number);
    }
}

void member(Team& team, int index, unsigned long seen) {
    std::unique_lock hold(team.lock);
    for (;;) {
        team.wake.wait(hold, [&] { return team.round != seen; });
        seen = team.round;
        if (index >= team.wanted) continue;
        hold.unlock();
        take_parts(team);
        hold.lock();
        if (--team.busy == 0) team.done.notify_one();
    }
}

// Starts members until there are `wanted`. Members block all signals, which the program's own threads handle.
void grow(Team& team, int wanted) {
    sigset_t everything, before;
    sigfillset(&everything);
    pthread_sigmask(SIG_SETMASK, &everything, &before);
    try {
        for (; team.members < wanted; ++team.members) {
            std::thread(member, std::ref(team), team.members, team.round).detach();
        }
    } catch (const std::system_error&) {
        // The system grants no more threads: the existing ones run all parts.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// The team is never destroyed: its members wait in it until the process ends. The team of a parent process is not
// touched.
Team& team_of_process() {
    static std::atomic<Team*> current{nullptr};
    Team* team = current.load();
    while (team == nullptr || team->owner != getpid()) {
        Team* fresh = new Team(getpid());
        if (current.compare_exchange_strong(team, fresh)) return *fresh;
        delete fresh;
    }
    return *team;
}

}  // namespace

void run_in_team(int threads, int parts, const std::function<void(int)>& part) {
    const int wanted = (threads < parts ? threads : parts) - 1;
    if (wanted <= 0) {
        for (int number = 0; number < parts; ++number) part(number);
        return;
    }
    Team& team = team_of_process();
    std::lock_guard turn(team.turn);
    {
        std::lock_guard hold(team.lock);
        grow(team, wanted);
        team.part = &part;
        team.parts = parts;
        team.next = 0;
        team.wanted = team.busy = wanted < team.members ? wanted : team.members;
        ++team.round;
    }
    team.wake.notify_all();
    take_parts(team);
    std::unique_lock hold(team.lock);
    team.done.wait(hold, [&] { return team.busy == 0; });
    team.wanted = 0;
}

}  // namespace windlass
