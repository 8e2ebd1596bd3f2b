// The module windlass.kernels._codecs: scales, codes and error feedback of compressed messages, bit for bit those of
// windlass/comm/lossy_codecs.py.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "team.hpp"

namespace nb = nanobind;

namespace {

constexpr std::int64_t kPart = 1 << 16;  // elements that a thread processes at a time: a multiple of every block
constexpr int kColumns = 256;            // sums of a block of signs, added to each other by halves
constexpr float kLeast = 1.17549435e-38f;

enum class Kind : int { sign = 0, int8 = 1, int4 = 2, fine_sign = 3 };

typedef float F8 __attribute__((vector_size(32)));
typedef std::int32_t I8 __attribute__((vector_size(32)));
typedef std::int8_t B8 __attribute__((vector_size(8)));

#define WINDLASS_INLINE [[gnu::always_inline]] inline

template <class V>
WINDLASS_INLINE V load(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
WINDLASS_INLINE void store(void* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

WINDLASS_INLINE F8 every(float value) { return F8{} + value; }
WINDLASS_INLINE F8 select(I8 mask, F8 yes, F8 no) { return (F8)(((I8)yes & mask) | ((I8)no & ~mask)); }

// Eight bytes of 0 or 1 as the bits of one byte, the first in the lowest bit.
WINDLASS_INLINE std::uint8_t bits_of(B8 flags) {
    std::uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(flags[i])) << (8 * i);
    return static_cast<std::uint8_t>((word * 0x0102040810204080) >> 56);
}

// 1. Scales. With `owed`, the errors are added to the values first.

template <bool owed>
WINDLASS_INLINE F8 read(float* values, const float* errors, std::int64_t i) {
    F8 value = load<F8>(values + i);
    if (owed) {
        value += load<F8>(errors + i);
        store(values + i, value);
    }
    return value;
}

template <bool owed>
WINDLASS_INLINE float read_one(float* values, const float* errors, std::int64_t i) {
    if (owed) values[i] += errors[i];
    return values[i];
}

// The mean absolute value: 256 sums of every 256th element, in order, then halves are added to halves.
template <bool owed>
WINDLASS_INLINE float sign_scale(float* values, const float* errors, std::int64_t count) {
    alignas(64) float sums[kColumns] = {};
    std::int64_t row = 0;
    for (; row + kColumns <= count; row += kColumns) {
        for (int i = 0; i < kColumns; i += 8) {
            const F8 size = (F8)((I8)read<owed>(values, errors, row + i) & 0x7fffffff);
            store(sums + i, load<F8>(sums + i) + size);
        }
    }
    for (std::int64_t i = row; i < count; ++i) sums[i - row] += __builtin_fabsf(read_one<owed>(values, errors, i));
    for (int width = kColumns / 2; width >= 8; width /= 2) {
        for (int i = 0; i < width; i += 8) store(sums + i, load<F8>(sums + i) + load<F8>(sums + width + i));
    }
    for (int width = 4; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) sums[i] += sums[width + i];
    }
    return sums[0] / static_cast<float>(count);
}

// The largest absolute value divided by `highest`. As integers, NaN is larger than every number.
template <bool owed>
WINDLASS_INLINE float integer_scale(float* values, const float* errors, std::int64_t count, float highest) {
    I8 most = {};
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const I8 size = (I8)read<owed>(values, errors, i) & 0x7fffffff;
        const I8 above = size > most;
        most = (size & above) | (most & ~above);
    }
    std::int32_t largest = 0;
    for (int lane = 0; lane < 8; ++lane) largest = std::max(largest, static_cast<std::int32_t>(most[lane]));
    for (; i < count; ++i) {
        const float value = read_one<owed>(values, errors, i);
        std::int32_t size;
        std::memcpy(&size, &value, sizeof size);
        largest = std::max(largest, size & 0x7fffffff);
    }
    float scale;
    std::memcpy(&scale, &largest, sizeof scale);
    scale /= highest;
    return scale < kLeast ? kLeast : scale;
}

// 2. Codes of one block. With `owed`, `errors` receives the rounding errors; with `kept`, `decoded` the decoded values.

template <bool owed, bool kept>
WINDLASS_INLINE void note(F8 value, F8 coded, std::int64_t i, float* errors, float* decoded) {
    if (owed) store(errors + i, value - coded);
    if (kept) store(decoded + i, coded);
}

template <bool owed, bool kept>
WINDLASS_INLINE void note_one(float value, float coded, std::int64_t i, float* errors, float* decoded) {
    if (owed) errors[i] = value - coded;
    if (kept) decoded[i] = coded;
}

template <bool owed, bool kept>
WINDLASS_INLINE void sign_codes(const float* values, float scale, std::int64_t count, std::uint8_t* codes,
                                float* errors, float* decoded) {
    const F8 plus = every(scale), minus = -plus;
    std::int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const F8 value = load<F8>(values + i);
        const I8 positive = value >= 0.0f;
        codes[i / 8] = bits_of(__builtin_convertvector(positive & 1, B8));
        note<owed, kept>(value, select(positive, plus, minus), i, errors, decoded);
    }
    if (i < count) codes[i / 8] = 0;
    for (std::int64_t first = i; i < count; ++i) {
        const bool positive = values[i] >= 0;
        codes[first / 8] = static_cast<std::uint8_t>(codes[first / 8] | (positive << (i - first)));
        note_one<owed, kept>(values[i], positive ? scale : -scale, i, errors, decoded);
    }
}

// Rounds to nearest, ties to even: the sum has no bits below 1. NaN becomes 0.
WINDLASS_INLINE F8 rounded(F8 value, float highest) {
    const float shift = 12582912.0f;
    value = select(value == value, value, F8{});
    value = select(value > highest, every(highest), value);
    value = select(value < -highest, every(-highest), value);
    return (value + shift) - shift;
}

// Codes of up to 8 elements at `i`; those behind `count` are 0.
template <bool owed, bool kept>
WINDLASS_INLINE I8 integers(const float* values, float scale, float inverse, float highest, std::int64_t i,
                            std::int64_t count, float* errors, float* decoded) {
    if (i + 8 <= count) {
        const F8 value = load<F8>(values + i), code = rounded(value * inverse, highest);
        note<owed, kept>(value, code * scale, i, errors, decoded);
        return __builtin_convertvector(code, I8);
    }
    F8 value = {};
    for (std::int64_t k = i; k < count; ++k) value[k - i] = values[k];
    const F8 code = rounded(value * inverse, highest), coded = code * scale;
    for (std::int64_t k = i; k < count; ++k) note_one<owed, kept>(value[k - i], coded[k - i], k, errors, decoded);
    return __builtin_convertvector(code, I8);
}

template <bool owed, bool kept>
WINDLASS_INLINE void int8_codes(const float* values, float scale, std::int64_t count, std::uint8_t* codes,
                                float* errors, float* decoded) {
    const float inverse = 1.0f / scale;
    for (std::int64_t i = 0; i < count; i += 8) {
        const I8 code = integers<owed, kept>(values, scale, inverse, 127.0f, i, count, errors, decoded);
        const B8 bytes = __builtin_convertvector(code, B8);
        std::memcpy(codes + i, &bytes, std::min<std::int64_t>(8, count - i));
    }
}

template <bool owed, bool kept>
WINDLASS_INLINE void int4_codes(const float* values, float scale, std::int64_t count, std::uint8_t* codes,
                                float* errors, float* decoded) {
    const float inverse = 1.0f / scale;
    for (std::int64_t i = 0; i < count; i += 8) {
        const I8 code = integers<owed, kept>(values, scale, inverse, 7.0f, i, count, errors, decoded) + 8;
        std::uint8_t bytes[4];
        for (int k = 0; k < 4; ++k) bytes[k] = static_cast<std::uint8_t>(code[2 * k] | (code[2 * k + 1] << 4));
        const std::int64_t left = count - i;
        if (left < 8 && left % 2) bytes[left / 2] &= 15;
        std::memcpy(codes + i / 2, bytes, std::min<std::int64_t>(4, (left + 1) / 2));
    }
}

// 3. Values of one block of codes, written to `out` or added to it.

template <bool adds>
WINDLASS_INLINE void put(float* out, std::int64_t i, std::int64_t count, F8 value) {
    if (i + 8 <= count) {
        store(out + i, adds ? load<F8>(out + i) + value : value);
        return;
    }
    for (std::int64_t k = i; k < count; ++k) out[k] = adds ? out[k] + value[k - i] : value[k - i];
}

template <bool adds>
WINDLASS_INLINE void sign_values(const std::uint8_t* codes, float scale, std::int64_t count, float* out) {
    const I8 bits = {1, 2, 4, 8, 16, 32, 64, 128};
    const F8 plus = every(scale), minus = -plus;
    for (std::int64_t i = 0; i < count; i += 8) {
        const I8 byte = I8{} + static_cast<std::int32_t>(codes[i / 8]);
        put<adds>(out, i, count, select((byte & bits) != 0, plus, minus));
    }
}

template <bool adds>
WINDLASS_INLINE void int8_values(const std::uint8_t* codes, float scale, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; i += 8) {
        B8 bytes = {};
        std::memcpy(&bytes, codes + i, std::min<std::int64_t>(8, count - i));
        put<adds>(out, i, count, __builtin_convertvector(bytes, F8) * scale);
    }
}

template <bool adds>
WINDLASS_INLINE void int4_values(const std::uint8_t* codes, float scale, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; i += 8) {
        std::uint8_t bytes[4] = {};
        std::memcpy(bytes, codes + i / 2, std::min<std::int64_t>(4, (count - i + 1) / 2));
        I8 code;
        for (int k = 0; k < 4; ++k) {
            code[2 * k] = bytes[k] & 15;
            code[2 * k + 1] = bytes[k] >> 4;
        }
        put<adds>(out, i, count, __builtin_convertvector(code - 8, F8) * scale);
    }
}

// Addresses of the tensors of one message; 0: there is no such tensor.
struct Message {
    Kind kind;
    std::int64_t count;
    float* values;
    float* scales;
    std::uint8_t* codes;
    float* errors;
    float* decoded;  // output of `decode`

    bool is_sign() const { return kind == Kind::sign || kind == Kind::fine_sign; }
    std::int64_t block() const { return kind == Kind::sign ? 2048 : kind == Kind::int4 ? 128 : 256; }
    std::uint8_t* codes_at(std::int64_t element) const {
        return codes + (is_sign() ? element / 8 : kind == Kind::int8 ? element : element / 2);
    }
};

template <bool owed>
WINDLASS_INLINE bool scale_blocks(const Message& m, std::int64_t begin, std::int64_t end) {
    std::int32_t finite = 1;
    for (std::int64_t at = begin, block = m.block(); at < end; at += block) {
        const std::int64_t count = std::min(block, end - at);
        float* values = m.values + at;
        const float* errors = owed ? m.errors + at : nullptr;
        const float scale = m.is_sign() ? sign_scale<owed>(values, errors, count)
                                                 : integer_scale<owed>(values, errors, count,
                                                                       m.kind == Kind::int8 ? 127.0f : 7.0f);
        m.scales[at / block] = scale;
        finite &= scale - scale == 0;
    }
    return finite != 0;
}

template <bool owed, bool kept>
WINDLASS_INLINE void code_blocks(const Message& m, std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin, block = m.block(); at < end; at += block) {
        const std::int64_t count = std::min(block, end - at);
        const float scale = m.scales[at / block];
        float *errors = owed ? m.errors + at : nullptr, *decoded = kept ? m.decoded + at : nullptr;
        if (m.is_sign()) {
            sign_codes<owed, kept>(m.values + at, scale, count, m.codes_at(at), errors, decoded);
        } else if (m.kind == Kind::int8) {
            int8_codes<owed, kept>(m.values + at, scale, count, m.codes_at(at), errors, decoded);
        } else {
            int4_codes<owed, kept>(m.values + at, scale, count, m.codes_at(at), errors, decoded);
        }
    }
}

template <bool adds>
WINDLASS_INLINE void decode_blocks(const Message& m, std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin, block = m.block(); at < end; at += block) {
        const std::int64_t count = std::min(block, end - at);
        const float scale = m.scales[at / block];
        if (m.is_sign()) {
            sign_values<adds>(m.codes_at(at), scale, count, m.decoded + at);
        } else if (m.kind == Kind::int8) {
            int8_values<adds>(m.codes_at(at), scale, count, m.decoded + at);
        } else {
            int4_values<adds>(m.codes_at(at), scale, count, m.decoded + at);
        }
    }
}

enum class Task : int { scales, codes, decode, add };

// Runs a task on elements [begin, end). Returns false if a scale is not finite.
WINDLASS_INLINE bool run_any(Task task, const Message& m, std::int64_t begin, std::int64_t end) {
    const bool owed = m.errors != nullptr, kept = m.decoded != nullptr;
    switch (task) {
        case Task::scales:
            return owed ? scale_blocks<true>(m, begin, end) : scale_blocks<false>(m, begin, end);
        case Task::codes:
            if (owed) {
                kept ? code_blocks<true, true>(m, begin, end) : code_blocks<true, false>(m, begin, end);
            } else {
                kept ? code_blocks<false, true>(m, begin, end) : code_blocks<false, false>(m, begin, end);
            }
            return true;
        case Task::decode:
            decode_blocks<false>(m, begin, end);
            return true;
        default:
            decode_blocks<true>(m, begin, end);
            return true;
    }
}

using Run = bool (*)(Task, const Message&, std::int64_t, std::int64_t);

bool plain(Task task, const Message& m, std::int64_t begin, std::int64_t end) { return run_any(task, m, begin, end); }

#if defined(__x86_64__)
[[gnu::target("avx2")]] bool avx2(Task task, const Message& m, std::int64_t begin, std::int64_t end) {
    return run_any(task, m, begin, end);
}
#endif

Run best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) return avx2;
#endif
    return plain;
}

bool run(Task task, const Message& m, int threads) {
    static const Run function = best();
    const auto parts = static_cast<int>((m.count + kPart - 1) / kPart);
    std::vector<char> finite(parts, 1);
    windlass::run_in_team(std::min(threads, parts), parts, [&](int number) {
        const std::int64_t first = number * kPart;
        finite[number] = function(task, m, first, std::min(m.count, first + kPart));
    });
    return std::all_of(finite.begin(), finite.end(), [](char one) { return one != 0; });
}

Message message(int kind, std::int64_t count, std::uint64_t values, std::uint64_t scales, std::uint64_t codes,
                std::uint64_t errors, std::uint64_t decoded) {
    if (kind < 0 || kind > 3) throw std::invalid_argument("there is no such codec");
    if (count < 0) throw std::invalid_argument("a message has a negative number of elements");
    return {static_cast<Kind>(kind),
            count,
            reinterpret_cast<float*>(values),
            reinterpret_cast<float*>(scales),
            reinterpret_cast<std::uint8_t*>(codes),
            reinterpret_cast<float*>(errors),
            reinterpret_cast<float*>(decoded)};
}

void need(bool there) {
    if (!there) throw std::invalid_argument("a tensor of a message has no memory (address 0)");
}

bool write_scales(int kind, std::int64_t count, std::uint64_t values, std::uint64_t errors, std::uint64_t scales,
                  int threads) {
    if (count == 0) return true;
    need(values && scales);
    return run(Task::scales, message(kind, count, values, scales, 0, errors, 0), threads);
}

void write_codes(int kind, std::int64_t count, std::uint64_t values, std::uint64_t scales, std::uint64_t codes,
                 std::uint64_t errors, std::uint64_t decoded, int threads) {
    if (count == 0) return;
    need(values && scales && codes);
    run(Task::codes, message(kind, count, values, scales, codes, errors, decoded), threads);
}

void decode(int kind, std::int64_t count, std::uint64_t scales, std::uint64_t codes, std::uint64_t out, bool adds,
            int threads) {
    if (count == 0) return;
    need(scales && codes && out);
    run(adds ? Task::add : Task::decode, message(kind, count, 0, scales, codes, 0, out), threads);
}

}  // namespace

NB_MODULE(_codecs, m) {
    nb::set_leak_warnings(false);
    m.doc() = "Scales and codes of messages in raw memory; call them through windlass.kernels.message_codes.";
    m.def("write_scales", &write_scales, nb::arg("kind"), nb::arg("count"), nb::arg("values"), nb::arg("errors"),
          nb::arg("scales"), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
    m.def("write_codes", &write_codes, nb::arg("kind"), nb::arg("count"), nb::arg("values"), nb::arg("scales"),
          nb::arg("codes"), nb::arg("errors"), nb::arg("decoded"), nb::arg("threads"),
          nb::call_guard<nb::gil_scoped_release>());
    m.def("decode", &decode, nb::arg("kind"), nb::arg("count"), nb::arg("scales"), nb::arg("codes"), nb::arg("out"),
          nb::arg("adds"), nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
}
