// windlass.kernels._disk: direct I/O on many blocks at once, by io_uring or by threads, without Python's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "disk_uring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace windlass::disk {
namespace {

using Span = std::tuple<uint32_t, uint64_t, uint64_t, uint64_t>;    // file, offset, address, bytes
using Error = std::tuple<int, uint32_t, uint64_t, uint64_t>;        // errno, file, offset, bytes done
using Totals = std::tuple<uint64_t, uint64_t, double, double, double>;

// An engine that ends with its last user; a forked child has its memory but not its threads and leaves it alone.
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

template <typename Engine>
class Disk {
 public:
    Disk(const std::vector<int>& files, unsigned at_once, uint64_t largest, uint64_t alignment) {
        try {
            engine_ = owned(new Engine(files, at_once, largest, alignment));
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
    }

    // None after close().
    std::optional<Started<Engine>> submit(bool write, const std::vector<Span>& spans) {
        std::vector<Block> blocks;
        blocks.reserve(spans.size());
        for (const auto& [file, offset, address, bytes] : spans) blocks.push_back({file, offset, address, bytes});
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
    pid_t owner_ = getpid();
    std::shared_ptr<Engine> engine_;
};

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
    using namespace windlass::disk;
    module.doc() = "Direct I/O on many blocks at once; see windlass/storage.";
    define<Uring>(module, "Uring", "UringRequest");
    define<Threads>(module, "Threads", "ThreadsRequest");
    module.def("direct_memory_alignment", &abi::direct_memory_alignment, "file"_a);
}
