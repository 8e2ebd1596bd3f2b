// The module windlass.kernels._inference: packed products and paged attention on raw addresses, linked against nothing
// but Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "inference_job.hpp"
#include "kernel_sets.hpp"
#include "parallel.hpp"
#include "shared_ranges.hpp"
#include "token_draw.hpp"

namespace nb = nanobind;

namespace windlass {
namespace {

constexpr std::int64_t kCacheBytes = 384 << 10;  // bytes of weights that a core keeps in its second-level cache
constexpr std::int64_t kRowsAtOnce = 1020;       // rows computed at once, so that their packed input is small
constexpr std::int64_t kMostFeatures = 1024;     // features of a head of a cache
// Work that one thread does in the time that a second one takes to start.
constexpr std::int64_t kSerialProducts = 100'000;
constexpr std::int64_t kSerialElements = 32'768;
constexpr std::int64_t kDecodes = 3;             // most parts of attention of one token that a thread takes at once
constexpr std::int64_t kPartsOfThread = 8;       // parts of a product: a delayed thread leaves its parts to the others
constexpr std::int64_t kAheadBytes = 256 << 10;  // bytes of the next product that a thread without work requests
constexpr std::int64_t kSerialPack = 64 << 10;   // bytes of packed input below which one thread packs it

const std::vector<NamedSet<InferenceSet>>& supported_sets() {
#if defined(__x86_64__)
    static const auto found = find_sets(BuiltSets<InferenceSet>{
        .baseline = &kInferenceBaseline,
        .avx2 = &kInferenceAvx2,
#if defined(WINDLASS_HAS_AVX_VNNI)
        .avx_vnni = &kInferenceAvxVnni,
#endif
        .avx512 = &kInferenceAvx512,
        .avx512_vnni = &kInferenceAvx512Vnni,
        .avx512_bf16 = &kInferenceAvx512Bf16});
#else
    static const auto found = find_sets(BuiltSets<InferenceSet>{&kInferenceBaseline});
#endif
    return found;
}

std::vector<std::string> instruction_sets() { return names_of(supported_sets()); }

const InferenceSet& set_at(int number) { return set_at(supported_sets(), number); }

PanelCode known_code(int code) {
    refuse(code < 0 || code > static_cast<int>(PanelCode::int8), "there is no such format of panels");
    return static_cast<PanelCode>(code);
}

// Bytes of a packed weight.
std::int64_t panel_bytes(int code, std::int64_t outputs, std::int64_t features) {
    GemmJob job{};
    job.code = known_code(code);
    job.outputs = outputs;
    job.features = features;
    return job.num_panels() * job.steps() * kStepBytes;
}

template <class Element>
void pack_panel(const Element* weight, char* to, std::int64_t panel, const GemmJob& job, Element offset) {
    const std::int64_t parts = features_per_step(job.code), first = panel * kPanel;
    auto* out = reinterpret_cast<Element*>(to + panel * job.steps() * kStepBytes);
    for (std::int64_t lane = 0; lane < kPanel; ++lane) {
        const bool exists = first + lane < job.outputs;
        const Element* row = weight + (first + lane) * job.features;
        for (std::int64_t i = 0; i < job.steps() * parts; ++i) {
            const Element value = exists && i < job.features ? row[i] : Element{};
            out[i / parts * kPanel * parts + lane * parts + i % parts] = static_cast<Element>(value ^ offset);
        }
    }
}

// Packs a contiguous matrix of float32, bf16 or int8 elements, as `code` selects.
void pack(int code, std::uint64_t weight, std::int64_t outputs, std::int64_t features, std::uint64_t panels, int threads) {
    GemmJob job{};
    job.code = known_code(code);
    job.outputs = outputs;
    job.features = features;
    refuse(weight == 0 || panels == 0 || outputs <= 0 || features <= 0 || threads <= 0,
           "a weight to be packed needs addresses, sizes and threads above 0");
    char* to = reinterpret_cast<char*>(panels);
    run_parallel(threads, static_cast<int>(job.num_panels()), [&](int panel) {
        switch (job.code) {
            case PanelCode::fp32:
                pack_panel(reinterpret_cast<const std::uint32_t*>(weight), to, panel, job, std::uint32_t{0});
                break;
            case PanelCode::bf16:
                pack_panel(reinterpret_cast<const std::uint16_t*>(weight), to, panel, job, std::uint16_t{0});
                break;
            case PanelCode::int8:  // the highest bit flipped is 128 added
                pack_panel(reinterpret_cast<const std::uint8_t*>(weight), to, panel, job, std::uint8_t{0x80});
                break;
        }
    });
}

// True if the dot product of bf16 pairs multiplies faster than widening and fp32 multiply-adds do. Intel's processors
// issue it at a third of the rate, so that it takes longer; they have tile instructions for many rows.
bool dots_of_bf16_are_fast() {
#if defined(__x86_64__)
    static const bool found = [] {
        __builtin_cpu_init();
        return static_cast<bool>(__builtin_cpu_is("amd"));
    }();
    return found;
#else
    return true;
#endif
}

// Divides the outputs of a product among threads: part i is panels [bounds[i], bounds[i + 1]). Returns the number of bands
// into which its `blocks` of rows are divided too.
std::int64_t divide_product(const InferenceSet& set, const GemmJob& job, std::int64_t blocks, int threads,
                            std::vector<std::int64_t>& bounds) {
    const std::int64_t panels = job.num_panels(), group = set.panel_group(job);
    const std::int64_t groups = (panels + group - 1) / group;
    // With many rows, each part is read again and again: its size is limited so that it stays in the cache.
    const std::int64_t fitting = std::max<std::int64_t>(1, kCacheBytes / (group * job.steps() * kStepBytes));
    divide_guided(panels, group, threads, blocks > kSlicedBlocks ? fitting * group : panels, bounds);
    const auto chunks = static_cast<std::int64_t>(bounds.size()) - 1;
    // Rows are divided too where there are fewer groups of outputs than threads could take.
    const std::int64_t wanted = (threads * kPartsOfThread + chunks - 1) / chunks;
    return threads == 1 || groups >= 4 * threads ? 1 : std::min(wanted, blocks);
}

void multiply_all(const InferenceSet& set, const GemmJob& job, int threads) {
    static thread_local Scratch scratch;
    static thread_local std::vector<RowBlock> blocks;
    blocks.resize(job.rows);
    std::int64_t bytes = 0;
    const std::int64_t number = set.divide_rows(job, blocks.data(), &bytes);
    char* packed = scratch.get(bytes);
    const RowBlock* divided = blocks.data();
    run_parallel(bytes < kSerialPack ? 1 : threads, static_cast<int>(number),
                 [&](int block) { set.pack_rows(job, divided[block], packed); });

    static thread_local std::vector<std::int64_t> kept;
    std::vector<std::int64_t>& bounds = kept;
    const std::int64_t bands = divide_product(set, job, number, threads, bounds);
    const auto chunks = static_cast<std::int64_t>(bounds.size()) - 1;
    run_parallel(threads, static_cast<int>(chunks * bands), [&](int part) {
        const std::int64_t chunk = part / bands, band = part % bands;
        set.multiply(job, divided, number * band / bands, number * (band + 1) / bands, packed, bounds[chunk],
                     bounds[chunk + 1]);
    });
}

// Inputs are rounded to int8 for int8 weights, to bf16 for bf16 weights.
void set_rounding(GemmJob& job, bool rounds_inputs) {
    refuse(rounds_inputs && job.code == PanelCode::fp32, "inputs of float32 weights are not rounded");
    job.codes_inputs = rounds_inputs && job.code == PanelCode::int8;
    job.rounds_to_bf16 = rounds_inputs && job.code == PanelCode::bf16;
    job.dots_bf16 = dots_of_bf16_are_fast();
}

// y = x @ weight.T * scales + bias. Address 0 of scales or bias: there are none.
void linear(int set, int code, std::uint64_t panels, std::int64_t outputs, std::int64_t features, std::uint64_t scales,
            std::uint64_t bias, std::uint64_t x, std::uint64_t y, std::int64_t rows, bool is_bf16, int threads,
            bool rounds_inputs) {
    const InferenceSet& chosen = set_at(set);
    GemmJob job{};
    job.panels = reinterpret_cast<const char*>(panels);
    job.code = known_code(code);
    job.rows = rows;
    job.outputs = outputs;
    job.features = features;
    job.scales = reinterpret_cast<const float*>(scales);
    job.bias = reinterpret_cast<const float*>(bias);
    job.x = reinterpret_cast<const void*>(x);
    job.y = reinterpret_cast<void*>(y);
    job.is_bf16 = is_bf16;
    set_rounding(job, rounds_inputs);
    refuse(panels == 0 || x == 0 || y == 0, "a product needs the addresses of weight, input and output");
    refuse(rows <= 0 || outputs <= 0 || features <= 0 || threads <= 0, "a product needs sizes and threads above 0");
    refuse(panels % kStepBytes != 0, "a packed weight begins at a multiple of 64 bytes");
    const std::int64_t width = is_bf16 ? 2 : 4;
    for (std::int64_t first = 0; first < rows; first += kRowsAtOnce) {
        GemmJob part = job;
        part.rows = std::min(kRowsAtOnce, rows - first);
        part.x = reinterpret_cast<const char*>(x) + first * features * width;
        part.y = reinterpret_cast<char*>(y) + first * outputs * width;
        multiply_all(chosen, part, threads);
    }
}

CacheOfLayer make_cache(int code, std::uint64_t keys, std::uint64_t values, std::uint64_t key_scales,
                        std::uint64_t value_scales, std::int64_t blocks, std::int64_t heads, std::int64_t key_dim,
                        std::int64_t value_dim, std::int64_t block_size) {
    refuse(code < 0 || code > static_cast<int>(CacheCode::int8), "there is no such format of caches");
    refuse(keys == 0 || values == 0, "a cache needs the addresses of keys and values");
    refuse(blocks <= 0 || heads <= 0 || key_dim <= 0 || value_dim <= 0, "a cache needs sizes above 0");
    refuse(key_dim > kMostFeatures || value_dim > kMostFeatures, "a head of a cache has at most 1024 features");
    refuse(block_size <= 0 || block_size % kPanel != 0, "the block size of a cache is a multiple of 16");
    const auto chosen = static_cast<CacheCode>(code);
    refuse((chosen == CacheCode::int8) != (key_scales != 0 && value_scales != 0), "only int8 caches have scales");
    return {reinterpret_cast<char*>(keys),
            reinterpret_cast<char*>(values),
            reinterpret_cast<float*>(key_scales),
            reinterpret_cast<float*>(value_scales),
            chosen,
            blocks,
            heads,
            key_dim,
            value_dim,
            block_size};
}

// Checks every address that attention will read, before it reads any.
void check_tables(const AttentionJob& job, std::int64_t sequences, std::int64_t tokens) {
    refuse(job.query_start[0] != 0 || job.query_start[sequences] != tokens,
           "query_start does not begin at 0 or does not end at the number of queries");
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
        const std::int64_t queries = job.query_start[sequence + 1] - job.query_start[sequence];
        const std::int64_t context = job.context_lengths[sequence];
        const std::string place = " of sequence " + std::to_string(sequence);
        if (queries < 0) throw std::invalid_argument("query_start decreases at the end" + place);
        if (queries == 0) continue;
        if (context < queries) throw std::invalid_argument("context_lengths is less than the queries" + place);
        const std::int64_t blocks = (context + job.cache.block_size - 1) / job.cache.block_size;
        if (blocks > job.table_stride) throw std::invalid_argument("block_table is too narrow for the context" + place);
        std::int64_t lowest = 0;
        const std::int64_t position = context - queries;
        if (job.window > 0) lowest = std::max<std::int64_t>(lowest, position - job.window + 1);
        if (job.chunk > 0) lowest = std::max(lowest, position - position % job.chunk);
        for (std::int64_t i = lowest / job.cache.block_size; i < blocks; ++i) {
            const std::int64_t block = job.block_table[sequence * job.table_stride + i];
            if (block < 0 || block >= job.cache.blocks) {
                throw std::invalid_argument("block " + std::to_string(i) + place + " is " + std::to_string(block) +
                                            " in block_table, in a cache of " + std::to_string(job.cache.blocks));
            }
        }
    }
}

// Parts of one token each that a thread takes at once: fewer if some have many more keys than others, so that the heads of
// a long sequence are divided among threads.
std::int64_t decodes_at_once(const AttentionJob& job, std::int64_t sequences, int threads) {
    std::int64_t most = 1, sum = 0;
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
        std::int64_t keys = job.context_lengths[sequence];
        for (const std::int64_t limit : {job.window, job.chunk}) keys = limit > 0 ? std::min(keys, limit) : keys;
        most = std::max(most, keys);
        sum += keys;
    }
    const std::int64_t share = sum * job.cache.heads / (most * threads);  // of a thread, in parts with the most keys
    return std::clamp<std::int64_t>(sum == most * sequences ? share : share / 2, 1, kDecodes);
}

void attend_all(const InferenceSet& chosen, const AttentionJob& job, std::int64_t tokens, std::int64_t sequences,
                int threads) {
    check_tables(job, sequences, tokens);
    const CacheOfLayer& cache = job.cache;
    static thread_local std::vector<AttentionPart> kept;
    std::vector<AttentionPart>& parts = kept;
    parts.clear();
    std::int64_t scores = 0;
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
        const std::int64_t queries = job.query_start[sequence + 1] - job.query_start[sequence];
        const std::int64_t rows = queries * job.group();
        scores += rows * cache.heads * job.context_lengths[sequence];
        // The last rows attend to the most keys: they come first, so that threads finish together.
        for (std::int64_t first = (rows - 1) / kPartRows * kPartRows; rows > 0 && first >= 0; first -= kPartRows) {
            for (std::int64_t head = 0; head < cache.heads; ++head) {
                parts.push_back({sequence, head, first, std::min(kPartRows, rows - first)});
            }
        }
    }
    const bool is_small = scores * (cache.key_dim + cache.value_dim) < kSerialProducts;
    const auto count = static_cast<std::int64_t>(parts.size());
    static thread_local SharedRanges kept_ranges;
    SharedRanges& ranges = kept_ranges;
    const auto used = static_cast<int>(std::min<std::int64_t>({is_small ? 1 : threads, count, SharedRanges::kMost}));
    const std::int64_t piece = tokens == sequences ? decodes_at_once(job, sequences, used) : 1;
    ranges.divide(count, 1, used);
    run_parallel(used, used, [&](int thread) {
        static thread_local Scratch scratch;
        char* memory = scratch.get(chosen.attention_scratch(job));
        ranges.take_all(thread, piece, [&](std::int64_t begin, std::int64_t end) {
            chosen.attend(job, parts.data() + begin, end - begin, memory);
        });
    });
}

AttentionJob make_attention(const CacheOfLayer& cache, std::uint64_t query, std::int64_t query_stride, std::uint64_t out,
                            bool is_bf16, std::int64_t heads, std::uint64_t block_table, std::int64_t table_stride,
                            std::uint64_t query_start, std::uint64_t context_lengths, double scaling, double softcap,
                            std::int64_t window, std::int64_t chunk, std::uint64_t sinks) {
    AttentionJob job{};
    job.cache = cache;
    job.query = reinterpret_cast<const void*>(query);
    job.query_stride = query_stride;
    job.out = reinterpret_cast<void*>(out);
    job.is_bf16 = is_bf16;
    job.heads = heads;
    job.block_table = reinterpret_cast<const std::int32_t*>(block_table);
    job.table_stride = table_stride;
    job.query_start = reinterpret_cast<const std::int32_t*>(query_start);
    job.context_lengths = reinterpret_cast<const std::int32_t*>(context_lengths);
    job.scaling = static_cast<float>(scaling);
    job.softcap = static_cast<float>(softcap);
    job.window = window;
    job.chunk = chunk;
    job.sinks = reinterpret_cast<const float*>(sinks);
    return job;
}

void attention(int set, const CacheOfLayer& cache, std::uint64_t query, std::uint64_t out, bool is_bf16,
               std::int64_t tokens, std::int64_t heads, std::uint64_t block_table, std::int64_t table_stride,
               std::uint64_t query_start, std::uint64_t context_lengths, std::int64_t sequences, double scaling,
               double softcap, std::int64_t window, std::int64_t chunk, std::uint64_t sinks, int threads) {
    const InferenceSet& chosen = set_at(set);
    refuse(query == 0 || out == 0 || query_start == 0 || context_lengths == 0 || block_table == 0,
           "attention needs the addresses of queries, output and tables");
    refuse(tokens <= 0 || heads <= 0 || heads % cache.heads != 0 || table_stride <= 0 || sequences <= 0 || threads <= 0,
           "attention needs sizes and threads above 0, and a multiple of the cache's heads");
    refuse(window < 0 || chunk < 0 || softcap < 0, "attention needs limits of 0 or more");
    const AttentionJob job =
        make_attention(cache, query, heads * cache.key_dim, out, is_bf16, heads, block_table, table_stride, query_start,
                       context_lengths, scaling, softcap, window, chunk, sinks);
    attend_all(chosen, job, tokens, sequences, threads);
}

void write_all(const InferenceSet& chosen, const WriteJob& job, int threads) {
    const CacheOfLayer& cache = job.cache;
    const std::int64_t tokens = job.tokens;
    for (std::int64_t token = 0; token < tokens; ++token) {
        if (job.slots[token] >= cache.blocks * cache.block_size) {
            throw std::invalid_argument("slot " + std::to_string(job.slots[token]) + " of token " +
                                        std::to_string(token) + " is beyond a cache of " +
                                        std::to_string(cache.blocks) + " blocks of " +
                                        std::to_string(cache.block_size) + " tokens");
        }
    }
    const bool is_small = tokens * cache.heads * (cache.key_dim + cache.value_dim) < kSerialElements;
    const std::int64_t parts = is_small ? 1 : std::min<std::int64_t>(threads, cache.heads);
    run_parallel(threads, static_cast<int>(parts), [&](int part) {
        chosen.write_heads(job, cache.heads * part / parts, cache.heads * (part + 1) / parts);
    });
}

void write_cache(int set, const CacheOfLayer& cache, std::uint64_t key, std::uint64_t value, bool is_bf16,
                 std::uint64_t slots, std::int64_t tokens, int threads) {
    const InferenceSet& chosen = set_at(set);
    refuse(key == 0 || value == 0 || slots == 0, "a write needs the addresses of keys, values and slots");
    refuse(tokens <= 0 || threads <= 0, "a write needs tokens and threads above 0");
    write_all(chosen,
              {cache, reinterpret_cast<const void*>(key), reinterpret_cast<const void*>(value),
               cache.heads * cache.key_dim, cache.heads * cache.value_dim, is_bf16,
               reinterpret_cast<const std::int64_t*>(slots), tokens},
              threads);
}

// Calls `rows(begin, end)` for parts of the rows on all threads, or for all rows on this thread if the work is small.
template <class Rows>
void over_rows(std::int64_t count, std::int64_t elements, int threads, const Rows& rows) {
    const std::int64_t parts = count * elements < kSerialElements ? 1 : std::min<std::int64_t>(count, threads);
    run_parallel(threads, static_cast<int>(parts),
                 [&](int part) { rows(count * part / parts, count * (part + 1) / parts); });
}

void rms_norm(int set, std::uint64_t x, std::uint64_t residual, std::uint64_t weight, std::uint64_t out, bool is_bf16,
              std::int64_t rows, std::int64_t features, double epsilon, int threads, std::int64_t heads,
              std::int64_t stride) {
    const InferenceSet& chosen = set_at(set);
    refuse(x == 0 || weight == 0 || out == 0 || rows <= 0 || features <= 0 || threads <= 0,
           "a norm needs addresses, sizes and threads above 0");
    if (stride == 0) stride = heads * features;
    refuse(heads <= 0 || rows % heads != 0 || stride < heads * features || (residual != 0 && stride != heads * features),
           "a norm of heads needs whole tokens that do not overlap, and takes no residual");
    const NormJob job{reinterpret_cast<const void*>(x), reinterpret_cast<void*>(residual), reinterpret_cast<void*>(out),
                      reinterpret_cast<const float*>(weight), is_bf16, features, static_cast<float>(epsilon),
                      heads, stride};
    over_rows(rows, features, threads,
              [&](std::int64_t begin, std::int64_t end) { chosen.normalize_rows(job, begin, end); });
}

void rotary(int set, std::uint64_t x, bool is_bf16, std::int64_t tokens, std::int64_t token_stride, std::int64_t heads,
            std::int64_t head_dim, std::int64_t rotary_dim, std::uint64_t cosines, std::uint64_t sines, int threads) {
    const InferenceSet& chosen = set_at(set);
    refuse(x == 0 || cosines == 0 || sines == 0 || tokens <= 0 || heads <= 0 || threads <= 0,
           "a rotation needs addresses, sizes and threads above 0");
    refuse(rotary_dim <= 0 || rotary_dim % 2 != 0 || rotary_dim > head_dim || token_stride < heads * head_dim,
           "a rotation needs an even number of features, at most those of a head, and tokens that do not overlap");
    const RotaryJob job{reinterpret_cast<void*>(x), is_bf16, token_stride, heads, head_dim, rotary_dim,
                        reinterpret_cast<const float*>(cosines), reinterpret_cast<const float*>(sines)};
    over_rows(tokens, heads * rotary_dim, threads,
              [&](std::int64_t begin, std::int64_t end) { chosen.rotate_rows(job, begin, end); });
}

void gated_activation(int set, int activation, std::uint64_t gate_up, std::uint64_t out, bool is_bf16, std::int64_t rows,
                      std::int64_t features, int threads) {
    const InferenceSet& chosen = set_at(set);
    refuse(activation < 0 || activation > static_cast<int>(Activation::gelu_tanh), "there is no such activation");
    refuse(gate_up == 0 || out == 0 || rows <= 0 || features <= 0 || threads <= 0,
           "an activation needs addresses, sizes and threads above 0");
    const GateJob job{reinterpret_cast<const void*>(gate_up), reinterpret_cast<void*>(out), is_bf16, features,
                      static_cast<Activation>(activation)};
    over_rows(rows, 4 * features, threads,
              [&](std::int64_t begin, std::int64_t end) { chosen.gate_rows(job, begin, end); });
}

// Reads memory on all threads, to compare the speed of products with that of reads.
std::uint64_t read_memory(int set, std::uint64_t address, std::int64_t bytes, int threads) {
    const InferenceSet& chosen = set_at(set);
    refuse(address == 0 || bytes <= 0 || threads <= 0, "a read needs an address, bytes and threads above 0");
    constexpr std::int64_t kPart = 4 << 20;
    std::atomic<std::uint64_t> total{0};
    run_parallel(threads, static_cast<int>((bytes + kPart - 1) / kPart), [&](int part) {
        const std::int64_t begin = part * kPart;
        total += chosen.read_words(reinterpret_cast<const char*>(address) + begin, std::min(kPart, bytes - begin));
    });
    return total;
}

// Draws a token for each row of scores, whose greatest is finite. `settings`: a DrawSettings for each row.
void draw_tokens(int set, std::uint64_t scores, std::int64_t rows, std::int64_t vocabulary, std::uint64_t settings,
                 std::uint64_t tokens, int threads) {
    const InferenceSet& chosen = set_at(set);
    refuse(scores == 0 || settings == 0 || tokens == 0 || rows <= 0 || vocabulary <= 0 || threads <= 0,
           "a draw needs addresses, sizes and threads above 0");
    over_rows(rows, vocabulary, threads, [&](std::int64_t begin, std::int64_t end) {
        static thread_local DrawBuffers buffers;
        for (std::int64_t i = begin; i < end; ++i) {
            RowOfScores row(chosen, reinterpret_cast<const float*>(scores) + i * vocabulary, vocabulary, buffers);
            reinterpret_cast<std::int64_t*>(tokens)[i] = row.draw(reinterpret_cast<const DrawSettings*>(settings)[i]);
        }
    });
}

float float_of(const void* from, std::int64_t at, bool is_bf16) {
    if (!is_bf16) return static_cast<const float*>(from)[at];
    const std::uint32_t bits = std::uint32_t{static_cast<const std::uint16_t*>(from)[at]} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to bf16, to nearest, ties to even.
std::uint16_t bf16_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Feed-forward experts of one layer: out[t] = sum over c of weights[t, c] * down(activation(gate) * up) with
// (gate, up) = gate_up(x[t]), of the experts index[t, c]. Numbers of no expert are left out. The sum is float32, in the
// order of the experts' numbers, and rounded once: it does not depend on other tokens.
class Experts {
   public:
    Experts(int set, int activation, std::int64_t features, std::int64_t inner, bool is_bf16)
        : set_(set), features_(features), inner_(inner), is_bf16_(is_bf16), activation_(static_cast<Activation>(activation)) {
        set_at(set);
        refuse(activation < 0 || activation > static_cast<int>(Activation::gelu_tanh), "there is no such activation");
        refuse(features <= 0 || inner <= 0, "experts need sizes above 0");
    }

    // Adds the next product: gate and up of the first expert as one, down of the first expert, gate and up of the second.
    void add_linear(int code, std::uint64_t panels, std::int64_t outputs, std::int64_t features, std::uint64_t scales,
                    bool rounds_inputs) {
        check_sizes(outputs, features);
        products_.push_back([=, set = set_, is_bf16 = is_bf16_](const void* x, void* y, std::int64_t rows, int threads) {
            linear(set, code, panels, outputs, features, scales, 0, reinterpret_cast<std::uint64_t>(x),
                   reinterpret_cast<std::uint64_t>(y), rows, is_bf16, threads, rounds_inputs);
        });
    }

    // `product` is the address of a ForeignProduct; `weight` that of its weight, which must outlive the experts.
    void add_foreign_product(std::uint64_t product, std::uint64_t weight, std::int64_t outputs, std::int64_t features) {
        check_sizes(outputs, features);
        refuse(product == 0 || weight == 0, "a product needs addresses");
        products_.push_back([=](const void* x, void* y, std::int64_t rows, int threads) {
            reinterpret_cast<ForeignProduct>(product)(reinterpret_cast<const void*>(weight), x, y, rows, threads,
                                                      run_parallel);
        });
    }

    // x, out: [tokens, features]; index: int64 [tokens, chosen]; weights: float32 or bf16 [tokens, chosen].
    void run(std::uint64_t x, std::uint64_t index, std::uint64_t weights, bool are_bf16, std::uint64_t out,
             std::int64_t tokens, std::int64_t chosen, int threads) const {
        refuse(x == 0 || index == 0 || weights == 0 || out == 0, "experts need addresses");
        refuse(tokens <= 0 || chosen <= 0 || threads <= 0, "experts need sizes and threads above 0");
        refuse(products_.empty() || products_.size() % 2 != 0, "each expert needs two products");
        static thread_local std::vector<std::int64_t> kept_ends, kept_pairs;
        std::vector<std::int64_t>&ends = kept_ends, &pairs = kept_pairs;
        const auto* numbers = reinterpret_cast<const std::int64_t*>(index);
        sort_pairs(numbers, tokens * chosen, ends, pairs);

        static thread_local Scratch sums_memory, rows_memory;
        float* sums = reinterpret_cast<float*>(out);
        if (is_bf16_) sums = reinterpret_cast<float*>(sums_memory.get(tokens * features_ * 4));
        std::fill(sums, sums + tokens * features_, 0.0f);
        const std::int64_t width = is_bf16_ ? 2 : 4;
        std::int64_t most = 0;
        for (std::size_t expert = 0; expert + 1 < ends.size(); ++expert) {
            most = std::max(most, std::min(ends[expert + 1] - ends[expert], kExpertRows));
        }
        const auto lines = [&](std::int64_t row_features) { return (most * row_features * width + 63) / 64 * 64; };
        char* gathered = rows_memory.get(2 * lines(features_) + lines(2 * inner_) + lines(inner_));
        char* found = gathered + lines(features_);
        char* gate_up = found + lines(features_);
        char* active = gate_up + lines(2 * inner_);
        const InferenceSet& set = set_at(set_);
        for (std::size_t expert = 0; expert + 1 < ends.size(); ++expert) {
            for (std::int64_t first = ends[expert]; first < ends[expert + 1]; first += kExpertRows) {
                const std::int64_t rows = std::min(kExpertRows, ends[expert + 1] - first);
                const std::int64_t* part = pairs.data() + first;
                over_rows(rows, features_, threads, [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t i = begin; i < end; ++i) {
                        std::memcpy(gathered + i * features_ * width,
                                    reinterpret_cast<const char*>(x) + part[i] / chosen * features_ * width,
                                    features_ * width);
                    }
                });
                products_[2 * expert](gathered, gate_up, rows, threads);
                const GateJob job{gate_up, active, is_bf16_, inner_, activation_};
                over_rows(rows, 4 * inner_, threads,
                          [&](std::int64_t begin, std::int64_t end) { set.gate_rows(job, begin, end); });
                products_[2 * expert + 1](active, found, rows, threads);
                add_rows(found, reinterpret_cast<const void*>(weights), are_bf16, part, rows, chosen, sums, threads);
            }
        }
        if (!is_bf16_) return;
        auto* rounded = reinterpret_cast<std::uint16_t*>(out);
        over_rows(tokens, features_, threads, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin * features_; i < end * features_; ++i) rounded[i] = bf16_of(sums[i]);
        });
    }

   private:
    static constexpr std::int64_t kExpertRows = 240;  // rows of an expert computed at once: bounds the memory of prompts

    void check_sizes(std::int64_t outputs, std::int64_t features) const {
        const bool is_first = products_.size() % 2 == 0;
        refuse(outputs != (is_first ? 2 * inner_ : features_) || features != (is_first ? features_ : inner_),
               "a product of an expert has other sizes");
    }

    // Sorts pairs of a token and a choice by expert, stably. The pairs of expert e are pairs[ends[e]] to
    // pairs[ends[e + 1] - 1].
    void sort_pairs(const std::int64_t* numbers, std::int64_t count, std::vector<std::int64_t>& ends,
                    std::vector<std::int64_t>& pairs) const {
        const auto experts = static_cast<std::int64_t>(products_.size()) / 2;
        const auto exists = [&](std::int64_t i) { return numbers[i] >= 0 && numbers[i] < experts; };
        ends.assign(experts + 1, 0);
        for (std::int64_t i = 0; i < count; ++i) {
            if (exists(i)) ++ends[numbers[i] + 1];
        }
        for (std::int64_t expert = 0; expert < experts; ++expert) ends[expert + 1] += ends[expert];
        pairs.resize(count);
        std::vector<std::int64_t> next(ends.begin(), ends.end() - 1);
        for (std::int64_t i = 0; i < count; ++i) {
            if (exists(i)) pairs[next[numbers[i]]++] = i;
        }
    }

    // Threads divide the features, so that two choices of one expert by one token are added in order.
    void add_rows(const char* found, const void* weights, bool are_bf16, const std::int64_t* pairs, std::int64_t rows,
                  std::int64_t chosen, float* sums, int threads) const {
        over_rows((features_ + 63) / 64, rows * 64, threads, [&](std::int64_t begin, std::int64_t end) {
            const std::int64_t last = std::min(end * 64, features_);
            for (std::int64_t i = 0; i < rows; ++i) {
                const float weight = float_of(weights, pairs[i], are_bf16);
                float* to = sums + pairs[i] / chosen * features_;
                if (is_bf16_) {
                    for (std::int64_t at = begin * 64; at < last; ++at) {
                        to[at] += weight * float_of(found, i * features_ + at, true);
                    }
                } else {
                    const float* from = reinterpret_cast<const float*>(found) + i * features_;
                    for (std::int64_t at = begin * 64; at < last; ++at) to[at] += weight * from[at];
                }
            }
        });
    }

    using RowProduct = std::function<void(const void* x, void* y, std::int64_t rows, int threads)>;

    const int set_;
    const std::int64_t features_, inner_;
    const bool is_bf16_;
    const Activation activation_;
    std::vector<RowProduct> products_;
};

// Sum of elements, with the bits of a + b in the arrays' own dtype.
void add_arrays(const InferenceSet& chosen, const AddJob& job, std::int64_t elements, int threads) {
    const std::int64_t parts = elements < kSerialElements ? 1 : threads;
    run_parallel(threads, static_cast<int>(parts), [&](int part) {
        // whole cache lines of either dtype
        const auto bound = [&](std::int64_t number) {
            return number == parts ? elements : elements * number / parts / 64 * 64;
        };
        chosen.add_elements(job, bound(part), bound(part + 1));
    });
}

// Prefetches weights on threads of a step that have no part to compute: each thread prefetches the weights of its own
// first part of the next product. So weights arrive from memory during norms, attention and the end of a product, too.
class WeightsAhead {
   public:
    WeightsAhead(const InferenceSet& set, int threads) : set_(set), threads_(threads), states_(threads) {}

    // Product of a step, with a weight of this module or of another one.
    struct Product {
        GemmJob job;
        FirstPartOf first_part = nullptr;  // of a foreign weight
        const void* weight = nullptr;
    };

    // `next` is the next product, or nullptr, and lives as long as this object.
    void aim(const Product* next) { next_.store(next, std::memory_order_release); }

    bool request(int thread) {
        const Product* product = next_.load(std::memory_order_acquire);
        if (thread >= threads_ || product == nullptr) return false;
        State& state = states_[thread];
        if (state.product != product) begin(state, *product, thread);
        if (state.offset >= state.last) return false;
        for (int line = 0; line < kLinesAtOnce; line += state.part.panels, state.offset += kStepBytes) {
            for (int panel = 0; panel < state.part.panels; ++panel) {
                __builtin_prefetch(state.part.begin + panel * state.part.panel_bytes + state.offset, 0, 2);
            }
        }
        return true;
    }

   private:
    static constexpr int kLinesAtOnce = 16;
    struct alignas(64) State {
        const Product* product = nullptr;
        FirstPart part;
        std::int64_t offset = 0, last = 0;  // bytes of each panel to request
    };

    void begin(State& state, const Product& product, int thread) {
        state.product = &product;
        state.offset = state.last = 0;
        state.part = product.first_part == nullptr
                         ? find_first_part(product.job, thread)
                         : product.first_part(product.weight, product.job.rows, thread, threads_);
        if (state.part.panels == 0) return;
        state.last = std::min(state.part.panel_bytes, kAheadBytes / state.part.panels / kStepBytes * kStepBytes);
    }

    FirstPart find_first_part(const GemmJob& job, int thread) const {
        static thread_local std::vector<RowBlock> blocks;
        static thread_local std::vector<std::int64_t> bounds;
        blocks.resize(job.rows);
        std::int64_t bytes = 0;
        const std::int64_t number = set_.divide_rows(job, blocks.data(), &bytes);
        const std::int64_t bands = divide_product(set_, job, number, threads_, bounds);
        if (bands > 1 || thread + 1 >= static_cast<int>(bounds.size())) return {};
        const std::int64_t panel_bytes = job.steps() * kStepBytes;
        const std::int64_t panels = std::min(bounds[thread + 1] - bounds[thread], set_.panel_group(job));
        return {job.panels + bounds[thread] * panel_bytes, panel_bytes, static_cast<int>(panels)};
    }

    const InferenceSet& set_;
    const int threads_;
    std::vector<State> states_;
    std::atomic<const Product*> next_{nullptr};
};

// Native operators of a step, whose tensors lie at fixed addresses. Their numbers of rows depend on the batch.
class StepProgram {
   public:
    // Rows or elements of an operator: for each token, and for each row of logits.
    using Count = std::pair<std::int64_t, std::int64_t>;

    explicit StepProgram(int set) : set_(set) { set_at(set); }

    void add_linear(int code, std::uint64_t panels, std::int64_t outputs, std::int64_t features, std::uint64_t scales,
                    std::uint64_t bias, std::uint64_t x, std::uint64_t y, Count count, bool is_bf16,
                    bool rounds_inputs) {
        refuse(panels == 0 || outputs <= 0 || features <= 0, "a product needs the address of the weight and sizes above 0");
        const int set = set_;
        GemmJob product{};
        product.panels = reinterpret_cast<const char*>(panels);
        product.code = known_code(code);
        product.outputs = outputs;
        product.features = features;
        product.is_bf16 = is_bf16;
        set_rounding(product, rounds_inputs);
        products_.push_back({calls_.size(), count, {product}});
        add([=](const Sizes& sizes) {
            if (const std::int64_t rows = sizes.of(count)) {
                linear(set, code, panels, outputs, features, scales, bias, x, y, rows, is_bf16, sizes.threads,
                       rounds_inputs);
            }
        });
    }

    // `product` and `first_part` are the addresses of a ForeignProduct and a FirstPartOf; `weight` that of their weight,
    // which must outlive the program.
    void add_foreign_product(std::uint64_t product, std::uint64_t first_part, std::uint64_t weight, std::uint64_t x,
                     std::uint64_t y, Count count) {
        refuse(product == 0 || first_part == 0 || weight == 0 || x == 0 || y == 0, "a product needs addresses");
        products_.push_back({calls_.size(),
                             count,
                             {{}, reinterpret_cast<FirstPartOf>(first_part), reinterpret_cast<const void*>(weight)}});
        add([=](const Sizes& sizes) {
            if (const std::int64_t rows = sizes.of(count)) {
                reinterpret_cast<ForeignProduct>(product)(reinterpret_cast<const void*>(weight),
                                                          reinterpret_cast<const void*>(x), reinterpret_cast<void*>(y),
                                                          rows, sizes.threads, run_parallel);
            }
        });
    }

    void add_rms_norm(std::uint64_t x, std::uint64_t weight, std::uint64_t out, bool is_bf16, Count count,
                      std::int64_t features, double epsilon, std::int64_t heads, std::int64_t stride) {
        const int set = set_;
        add([=](const Sizes& sizes) {
            if (const std::int64_t rows = sizes.of(count)) {
                rms_norm(set, x, 0, weight, out, is_bf16, rows, features, epsilon, sizes.threads, heads, stride);
            }
        });
    }

    void add_rotary(std::uint64_t x, bool is_bf16, std::int64_t token_stride, std::int64_t heads,
                    std::int64_t head_dim, std::int64_t rotary_dim, std::uint64_t cosines, std::uint64_t sines) {
        const int set = set_;
        add([=](const Sizes& sizes) {
            rotary(set, x, is_bf16, sizes.tokens, token_stride, heads, head_dim, rotary_dim, cosines, sines,
                   sizes.threads);
        });
    }

    void add_gated_activation(int activation, std::uint64_t gate_up, std::uint64_t out, bool is_bf16, Count count,
                              std::int64_t features) {
        const int set = set_;
        add([=](const Sizes& sizes) {
            if (const std::int64_t rows = sizes.of(count)) {
                gated_activation(set, activation, gate_up, out, is_bf16, rows, features, sizes.threads);
            }
        });
    }

    // Copies rows of a table: out[i] = table[index[i]]. The table has `table_rows` rows, as all counts for each token and
    // each row of logits, and `more_rows` besides.
    void add_gather(std::uint64_t table, std::int64_t row_bytes, Count table_rows, std::int64_t more_rows,
                    std::uint64_t index, std::uint64_t out, Count count) {
        refuse(table == 0 || row_bytes <= 0 || index == 0 || out == 0, "a gather needs addresses and bytes above 0");
        const auto* numbers = reinterpret_cast<const std::int64_t*>(index);
        add([=](const Sizes& sizes) {
            const std::int64_t rows = sizes.of(count), limit = sizes.of(table_rows) + more_rows;
            for (std::int64_t i = 0; i < rows; ++i) {
                if (numbers[i] < 0 || numbers[i] >= limit) {
                    throw std::invalid_argument("index " + std::to_string(numbers[i]) + " is beyond a table of " +
                                                std::to_string(limit) + " rows");
                }
            }
            if (rows == 0) return;
            over_rows(rows, row_bytes / 4, sizes.threads, [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) {
                    std::memcpy(reinterpret_cast<char*>(out) + i * row_bytes,
                                reinterpret_cast<const char*>(table) + numbers[i] * row_bytes, row_bytes);
                }
            });
        });
    }

    void add_sum(std::uint64_t a, std::uint64_t b, std::uint64_t out, bool is_bf16, Count count) {
        refuse(a == 0 || b == 0 || out == 0, "a sum needs addresses");
        const InferenceSet& chosen = set_at(set_);
        const AddJob job{reinterpret_cast<const void*>(a), reinterpret_cast<const void*>(b),
                         reinterpret_cast<void*>(out), is_bf16};
        add([=, &chosen](const Sizes& sizes) {
            if (const std::int64_t elements = sizes.of(count)) add_arrays(chosen, job, elements, sizes.threads);
        });
    }

    // `experts` must outlive the program. The count is that of the tokens; each has `chosen` experts.
    void add_experts(const Experts& experts, std::uint64_t x, std::uint64_t index, std::uint64_t weights, bool are_bf16,
                     std::uint64_t out, Count count, std::int64_t chosen) {
        refuse(x == 0 || index == 0 || weights == 0 || out == 0 || chosen <= 0, "experts need addresses and choices");
        add([=, &experts](const Sizes& sizes) {
            if (const std::int64_t tokens = sizes.of(count)) {
                experts.run(x, index, weights, are_bf16, out, tokens, chosen, sizes.threads);
            }
        });
    }

    // Stores keys and values of the tokens, and attends to those of their sequences.
    void add_attention(const CacheOfLayer& cache, std::uint64_t query, std::int64_t query_stride, std::uint64_t key,
                       std::int64_t key_stride, std::uint64_t value, std::int64_t value_stride, std::uint64_t out,
                       bool is_bf16, std::int64_t heads, std::uint64_t slots, std::uint64_t block_table,
                       std::int64_t table_stride, std::uint64_t query_start, std::uint64_t context_lengths,
                       double scaling, double softcap, std::int64_t window, std::int64_t chunk, std::uint64_t sinks) {
        refuse(query == 0 || key == 0 || value == 0 || out == 0 || slots == 0 || block_table == 0 ||
                   query_start == 0 || context_lengths == 0,
               "attention needs addresses");
        refuse(heads <= 0 || heads % cache.heads != 0 || table_stride <= 0 || window < 0 || chunk < 0 || softcap < 0,
               "attention needs sizes above 0, and a multiple of the cache's heads");
        refuse(query_stride < heads * cache.key_dim || key_stride < cache.heads * cache.key_dim ||
                   value_stride < cache.heads * cache.value_dim,
               "attention needs tokens that do not overlap");
        const InferenceSet& chosen = set_at(set_);
        const WriteJob written{cache,      reinterpret_cast<const void*>(key),
                               reinterpret_cast<const void*>(value),
                               key_stride, value_stride,
                               is_bf16,    reinterpret_cast<const std::int64_t*>(slots),
                               0};
        const AttentionJob job =
            make_attention(cache, query, query_stride, out, is_bf16, heads, block_table, table_stride, query_start,
                           context_lengths, scaling, softcap, window, chunk, sinks);
        add([=, &chosen](const Sizes& sizes) {
            WriteJob now = written;
            now.tokens = sizes.tokens;
            write_all(chosen, now, sizes.threads);
            attend_all(chosen, job, sizes.tokens, sizes.sequences, sizes.threads);
        });
    }

    void run(std::int64_t tokens, std::int64_t rows, std::int64_t sequences, int threads) const {
        refuse(tokens <= 0 || rows < 0 || sequences <= 0 || threads <= 0, "a step needs tokens, sequences and threads");
        const Sizes sizes{tokens, rows, sequences, threads};
        // Products of this step, and their places among the calls.
        std::vector<WeightsAhead::Product> products;
        std::vector<std::size_t> places;
        products.reserve(products_.size());
        for (const Product& product : products_) {
            const std::int64_t count = sizes.of(product.count);
            if (count == 0) continue;
            products.push_back(product.product);
            products.back().job.rows = std::min(kRowsAtOnce, count);
            places.push_back(product.place);
        }
        WeightsAhead ahead(set_at(set_), threads);
        const auto lead = [&] {
            std::size_t next = 0;
            for (std::size_t place = 0; place < calls_.size(); ++place) {
                while (next < places.size() && places[next] <= place) ++next;
                ahead.aim(next < places.size() ? &products[next] : nullptr);
                calls_[place](sizes);
            }
        };
        if (products.empty()) return lead();
        run_with_crew(threads, lead, [&](int thread) { return ahead.request(thread); });
    }

   private:
    struct Sizes {
        std::int64_t tokens, rows, sequences;
        int threads;

        std::int64_t of(const Count& count) const { return count.first * tokens + count.second * rows; }
    };
    using Call = std::function<void(const Sizes&)>;

    struct Product {
        std::size_t place;  // index among the calls
        Count count;
        WeightsAhead::Product product;  // `rows` of its job is not set
    };

    void add(Call call) { calls_.push_back(std::move(call)); }

    const int set_;
    std::vector<Call> calls_;
    std::vector<Product> products_;
};

}  // namespace
}  // namespace windlass

NB_MODULE(_inference, module) {
    nb::set_leak_warnings(false);  // objects in use at the end of the interpreter are not errors
    using namespace nb::literals;
    using WithoutGil = nb::call_guard<nb::gil_scoped_release>;
    using windlass::StepProgram;
    module.def("instruction_sets", windlass::instruction_sets);
    module.def("panel_bytes", windlass::panel_bytes, "code"_a, "outputs"_a, "features"_a);
    module.def("pack", windlass::pack, "code"_a, "weight"_a, "outputs"_a, "features"_a, "panels"_a, "threads"_a, WithoutGil());
    nb::class_<windlass::CacheOfLayer>(module, "Cache");
    module.def("cache", windlass::make_cache, "code"_a, "keys"_a, "values"_a, "key_scales"_a, "value_scales"_a,
               "blocks"_a, "heads"_a, "key_dim"_a, "value_dim"_a, "block_size"_a);
    module.def("attention", windlass::attention, "instruction_set"_a, "cache"_a, "query"_a, "out"_a, "is_bf16"_a,
               "tokens"_a, "heads"_a, "block_table"_a, "table_stride"_a, "query_start"_a, "context_lengths"_a,
               "sequences"_a, "scaling"_a, "softcap"_a, "window"_a, "chunk"_a, "sinks"_a, "threads"_a, WithoutGil());
    module.def("write_cache", windlass::write_cache, "instruction_set"_a, "cache"_a, "key"_a, "value"_a, "is_bf16"_a,
               "slots"_a, "tokens"_a, "threads"_a, WithoutGil());
    module.def("rms_norm", windlass::rms_norm, "instruction_set"_a, "x"_a, "residual"_a, "weight"_a, "out"_a,
               "is_bf16"_a, "rows"_a, "features"_a, "epsilon"_a, "threads"_a, "heads"_a = 1, "stride"_a = 0,
               WithoutGil());
    module.def("rotary", windlass::rotary, "instruction_set"_a, "x"_a, "is_bf16"_a, "tokens"_a, "token_stride"_a,
               "heads"_a, "head_dim"_a, "rotary_dim"_a, "cosines"_a, "sines"_a, "threads"_a, WithoutGil());
    module.def("gated_activation", windlass::gated_activation, "instruction_set"_a, "activation"_a, "gate_up"_a,
               "out"_a, "is_bf16"_a, "rows"_a, "features"_a, "threads"_a, WithoutGil());
    module.def("draw_tokens", windlass::draw_tokens, "instruction_set"_a, "scores"_a, "rows"_a, "vocabulary"_a,
               "settings"_a, "tokens"_a, "threads"_a, WithoutGil());
    module.def("read_memory", windlass::read_memory, "instruction_set"_a, "address"_a, "bytes"_a, "threads"_a, WithoutGil());
    module.def("linear", windlass::linear, "instruction_set"_a, "code"_a, "panels"_a, "outputs"_a, "features"_a,
               "scales"_a, "bias"_a, "x"_a, "y"_a, "rows"_a, "is_bf16"_a, "threads"_a, "rounds_inputs"_a, WithoutGil());
    using windlass::Experts;
    nb::class_<Experts>(module, "Experts")
        .def(nb::init<int, int, std::int64_t, std::int64_t, bool>(), "instruction_set"_a, "activation"_a, "features"_a,
             "inner"_a, "is_bf16"_a)
        .def("add_linear", &Experts::add_linear, "code"_a, "panels"_a, "outputs"_a, "features"_a, "scales"_a,
             "rounds_inputs"_a)
        .def("add_foreign_product", &Experts::add_foreign_product, "product"_a, "weight"_a, "outputs"_a, "features"_a)
        .def("run", &Experts::run, "x"_a, "index"_a, "weights"_a, "are_bf16"_a, "out"_a, "tokens"_a, "chosen"_a,
             "threads"_a, WithoutGil());
    nb::class_<StepProgram>(module, "StepProgram")
        .def(nb::init<int>(), "instruction_set"_a)
        .def("add_linear", &StepProgram::add_linear, "code"_a, "panels"_a, "outputs"_a, "features"_a, "scales"_a,
             "bias"_a, "x"_a, "y"_a, "count"_a, "is_bf16"_a, "rounds_inputs"_a)
        .def("add_foreign_product", &StepProgram::add_foreign_product, "product"_a, "first_part"_a, "weight"_a, "x"_a,
             "y"_a, "count"_a)
        .def("add_rms_norm", &StepProgram::add_rms_norm, "x"_a, "weight"_a, "out"_a, "is_bf16"_a, "count"_a,
             "features"_a, "epsilon"_a, "heads"_a = 1, "stride"_a = 0)
        .def("add_rotary", &StepProgram::add_rotary, "x"_a, "is_bf16"_a, "token_stride"_a, "heads"_a, "head_dim"_a,
             "rotary_dim"_a, "cosines"_a, "sines"_a)
        .def("add_gated_activation", &StepProgram::add_gated_activation, "activation"_a, "gate_up"_a, "out"_a,
             "is_bf16"_a, "count"_a, "features"_a)
        .def("add_gather", &StepProgram::add_gather, "table"_a, "row_bytes"_a, "table_rows"_a, "more_rows"_a, "index"_a,
             "out"_a, "count"_a)
        .def("add_sum", &StepProgram::add_sum, "a"_a, "b"_a, "out"_a, "is_bf16"_a, "count"_a)
        .def("add_experts", &StepProgram::add_experts, "experts"_a, "x"_a, "index"_a, "weights"_a, "are_bf16"_a,
             "out"_a, "count"_a, "chosen"_a)
        .def("add_attention", &StepProgram::add_attention, "cache"_a, "query"_a, "query_stride"_a, "key"_a,
             "key_stride"_a, "value"_a, "value_stride"_a, "out"_a, "is_bf16"_a, "heads"_a, "slots"_a, "block_table"_a,
             "table_stride"_a, "query_start"_a, "context_lengths"_a, "scaling"_a, "softcap"_a, "window"_a, "chunk"_a,
             "sinks"_a)
        .def("run", &StepProgram::run, "tokens"_a, "rows"_a, "sequences"_a, "threads"_a, WithoutGil());
}
