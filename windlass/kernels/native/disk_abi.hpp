// The part of the kernel's io_uring and statx interface that the disk tier uses.
//
// Defined here, under separate names, because the headers of a build machine are often older than the kernel that runs
// the program (wheels are built against headers without io_uring). These layouts never change: they are the kernel's
// contract with programs. Sources: io_uring_setup(2), io_uring_enter(2), io_uring_register(2), statx(2).
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdint>

namespace windlass::disk::abi {

inline constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // the same on every architecture we build for

inline constexpr uint64_t kSqRing = 0, kCqRing = 0x8000000, kSqes = 0x10000000;  // offsets to mmap

inline constexpr uint32_t kSingleIssuer = 1u << 12, kDeferTaskrun = 1u << 13;
inline constexpr uint32_t kSingleMmap = 1u << 0;
inline constexpr uint32_t kGetEvents = 1u << 0;
inline constexpr uint8_t kFixedFile = 1u << 0;

inline constexpr uint8_t kOpReadFixed = 4, kOpWriteFixed = 5, kOpPoll = 6, kOpRead = 22, kOpWrite = 23;

// The kernel reads the events of a poll as two swapped halves on big-endian machines.
inline constexpr uint32_t kPollIn = std::endian::native == std::endian::little ? 1u : 1u << 16;

inline constexpr unsigned kRegisterFiles = 2, kRegisterProbe = 8, kRegisterBuffers2 = 15, kUpdateBuffers = 16;
inline constexpr uint32_t kSparse = 1u << 0;
inline constexpr uint16_t kOpSupported = 1u << 0;

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved1;
    uint64_t user_address;
};

struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved1;
    uint64_t user_address;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
    SqOffsets sq;
    CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct Sqe {
    uint8_t opcode, flags;
    uint16_t priority;
    int32_t fd;
    uint64_t offset, address;
    uint32_t length, rw_flags;
    uint64_t user_data;
    uint16_t buffer_index, personality;
    int32_t splice_fd;
    uint64_t padding[2];
};
static_assert(sizeof(Sqe) == 64);

struct Cqe {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct ProbeOp {
    uint8_t op, reserved;
    uint16_t flags;
    uint32_t reserved2;
};

struct Probe {
    uint8_t last_op, ops_len;
    uint16_t reserved;
    uint32_t reserved2[3];
    ProbeOp ops[64];
};

struct ResourceRegister {
    uint32_t count, flags;
    uint64_t reserved, data, tags;
};

struct ResourceUpdate {
    uint32_t offset, reserved;
    uint64_t data, tags;
    uint32_t count, reserved2;
};

inline int setup(unsigned entries, Params* params) { return static_cast<int>(syscall(kSetup, entries, params)); }

inline int enter(int ring, unsigned submit, unsigned wait_for, unsigned flags) {
    return static_cast<int>(syscall(kEnter, ring, submit, wait_for, flags, nullptr, 0));
}

inline int control(int ring, unsigned what, void* argument, unsigned count) {
    return static_cast<int>(syscall(kRegister, ring, what, argument, count));
}

struct Statx {
    uint32_t mask;
    uint8_t before_alignments[148];
    uint32_t memory_alignment, offset_alignment;  // alignments of direct I/O; 0: the file does not support it
    uint8_t after_alignments[96];
};
static_assert(sizeof(Statx) == 256);

// Alignment of memory addresses that direct I/O on `fd` requires, in bytes; 0 if the kernel does not report it (before
// 6.1).
inline uint32_t direct_memory_alignment(int fd) {
#ifdef __NR_statx
    constexpr unsigned kEmptyPath = 0x1000, kDirectAlignment = 0x2000;
    Statx found{};
    if (syscall(__NR_statx, fd, "", kEmptyPath, kDirectAlignment, &found) == 0 && (found.mask & kDirectAlignment)) {
        return found.memory_alignment;
    }
#else
    static_cast<void>(fd);
#endif
    return 0;
}

}  // namespace windlass::disk::abi
