// windlass.kernels._disk: direct I/O on many blocks at once, by io_uring or by threads, without Python's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "disk_uring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace windlass::disk {
namespace {

using Span = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t, uint64_t>;  // file, offset, address, bytes, sums
using Error = std::tuple<int, uint32_t, uint64_t, uint64_t>;                // errno, file, offset, bytes done
using Totals = std::tuple<uint64_t, uint64_t, double, double, double>;

// Returns an owner of `engine`, which is closed with its last reference. A forked child has the engine's memory but not
// its threads, so the child does not close the engine.
template <typename Engine>
std::shared_ptr<Engine> owned(Engine* engine) {
    return {engine, [owner = getpid()](Engine* ending) {
                if (getpid() != owner) return;
                ending->close();
                delete ending;
            }};
}

template <typename Engine>
struct Started {
    std::shared_ptr<Engine> engine;
    RequestPtr request;

    bool done() const { return engine->queue.done(*request); }
    bool wait(double seconds) const { return engine->queue.wait(*request, seconds); }
    std::optional<Error> failure() const {
        const auto found = engine->queue.failure(*request);
        if (!found) return std::nullopt;
        return Error{found->error, found->file, found->offset, found->done};
    }
};

constexpr uint64_t kLargest = 1ull << 30;

template <typename Engine>
class Disk {
 public:
    Disk(const std::vector<int>& files, unsigned at_once, uint64_t largest, uint64_t alignment)
        : files_(files.size()), largest_(largest) {
        if (at_once == 0 || alignment == 0 || largest == 0 || largest > kLargest) {
            throw std::invalid_argument("an engine needs blocks in flight, an alignment, and blocks of up to 1 GiB");
        }
        try {
            engine_ = owned(new Engine(files, at_once, largest, alignment));
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
    }

    // Starts the transfer of `spans`. Returns None after close().
    std::optional<Started<Engine>> submit(bool write, const std::vector<Span>& spans) {
        check(spans);
        std::vector<Block> blocks;
        blocks.reserve(spans.size());
        for (const auto& [file, offset, address, bytes, sums] : spans) {
            blocks.push_back({file, offset, address, bytes, sums});
        }
        RequestPtr request = engine_->queue.add(write, blocks);
        if (!request) return std::nullopt;
        engine_->wake();
        return Started<Engine>{engine_, std::move(request)};
    }

    int add_region(uint64_t address, uint64_t bytes) { return engine_->add_region(address, bytes); }

    void remove_region(int place) {
        if (getpid() == owner_) engine_->remove_region(place);
    }

    Totals totals() const {
        const Counters found = engine_->queue.counters();
        return {found.read_bytes, found.write_bytes, found.read_seconds, found.write_seconds, found.busy_seconds};
    }

    void close() {
        if (getpid() == owner_) engine_->close();
    }

 private:
    // Check all blocks before any starts: an invalid block would access memory or file ranges that do not exist.
    void check(const std::vector<Span>& spans) const {
        for (const auto& [file, offset, address, bytes, sums] : spans) {
            if (file >= files_) throw std::invalid_argument("a span names a file that the engine was not given");
            if (bytes == 0 || bytes > largest_) throw std::invalid_argument("a span is empty, or larger than a block");
            if (offset > INT64_MAX - bytes) throw std::invalid_argument("a span lies beyond the end of any file");
            if (address == 0) throw std::invalid_argument("a span has no memory (address 0)");
            if (sums != 0 && bytes % kPage) throw std::invalid_argument("checksums are of whole pages of 4096 bytes");
        }
    }

    uint64_t files_, largest_;
    pid_t owner_ = getpid();
    std::shared_ptr<Engine> engine_;
};

std::vector<std::string> checksum_paths() {
    std::vector<std::string> names;
    for (const CrcPath& path : crc_paths()) names.emplace_back(path.name);
    return names;
}

// CRC-32C of each page of memory, by one of `checksum_paths()`; by default the first.
std::vector<uint32_t> page_checksums(uint64_t address, uint64_t bytes, const std::string& path) {
    if (bytes % kCrcPage) throw std::invalid_argument("checksums are of whole pages of 4096 bytes");
    if (address == 0 && bytes) throw std::invalid_argument("there is no memory at address 0");
    for (const CrcPath& one : crc_paths()) {
        if (!path.empty() && path != one.name) continue;
        std::vector<uint32_t> sums(bytes / kCrcPage);
        nb::gil_scoped_release released;
        one.pages(reinterpret_cast<const char*>(address), sums.size(), sums.data());
        return sums;
    }
    throw std::invalid_argument("this processor has no checksums by " + path);
}

template <typename Engine>
void define(nb::module_& module, const char* name, const char* request_name) {
    using Request = Started<Engine>;
    using Guard = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Request>(module, request_name)
        .def("done", &Request::done)
        .def("wait", &Request::wait, "seconds"_a, Guard())
        .def("failure", &Request::failure);
    nb::class_<Disk<Engine>>(module, name)
        .def(nb::init<const std::vector<int>&, unsigned, uint64_t, uint64_t>(), "files"_a, "at_once"_a, "largest"_a,
             "alignment"_a)
        .def("submit", &Disk<Engine>::submit, "write"_a, "spans"_a)
        .def("add_region", &Disk<Engine>::add_region, "address"_a, "bytes"_a, Guard())
        .def("remove_region", &Disk<Engine>::remove_region, "place"_a, Guard())
        .def("totals", &Disk<Engine>::totals)
        .def("close", &Disk<Engine>::close, Guard());
}

}  // namespace
}  // namespace windlass::disk

NB_MODULE(_disk, module) {
    nb::set_leak_warnings(false);  // objects in use at the end of the interpreter are not errors
    using namespace windlass::disk;
    module.doc() = "Direct I/O on many blocks at once; see windlass/storage.";
    define<Uring>(module, "Uring", "UringRequest");
    define<Threads>(module, "Threads", "ThreadsRequest");
    module.def("direct_memory_alignment", &abi::direct_memory_alignment, "file"_a);
    module.def("checksum_paths", &checksum_paths);
    module.def("page_checksums", &page_checksums, "address"_a, "bytes"_a, "path"_a = "");
}
