// Jobs of inference in plain numbers and addresses: shared by the module and every instruction set.
#pragma once

#include <cstdint>

namespace windlass {

// Outputs of one panel of a packed weight: a step of the panel is one cache line, whatever the format.
constexpr std::int64_t kPanel = 16;
constexpr std::int64_t kStepBytes = 64;

// Formats of packed weights. A step of a panel has 1, 2 or 4 input features of each output, side by side in 32 bits, so
// that both a widening loop and a dot-product instruction can use it. int8 is stored with an offset of 128.
enum class PanelCode : int { fp32 = 0, bf16 = 1, int8 = 2 };

// Features of an input row that share a scale where inputs are rounded to int8.
constexpr std::int64_t kCodeGroup = 128;

constexpr std::int64_t features_per_step(PanelCode code) {
    return code == PanelCode::fp32 ? 1 : code == PanelCode::bf16 ? 2 : 4;
}

// Maximum number of blocks of rows for which the weight is read in slices that serve all blocks; see gemm.hpp.
constexpr std::int64_t kSlicedBlocks = 8;

// y[m, n] = sum_k x[m, k] * w[n, k] * scale[n] + bias[n]
struct GemmJob {
    const char* panels;
    PanelCode code;
    std::int64_t rows, outputs, features;
    const float* scales;  // scales of the outputs; nullptr: 1
    const float* bias;    // nullptr: 0
    const void* x;        // [rows, features], contiguous
    void* y;              // [rows, outputs], contiguous
    bool is_bf16;         // x and y; else float32
    bool codes_inputs;    // int8 weights: x is rounded to int8 with one scale for each row and kCodeGroup features
    bool rounds_to_bf16;  // bf16 weights: x is rounded to bf16
    bool dots_bf16;       // bf16 weights and bf16 or rounded x: use the dot-product instruction, where there is one

    std::int64_t steps() const { return (features + features_per_step(code) - 1) / features_per_step(code); }
    std::int64_t num_panels() const { return (outputs + kPanel - 1) / kPanel; }
};

// Rows that one micro-kernel computes together. `padded` >= `count` is a size that the instruction set has.
struct RowBlock {
    std::int64_t first, count, padded;
    std::int64_t offset;  // bytes before its packed input
};

enum class CacheCode : int { fp32 = 0, bf16 = 1, int8 = 2 };

constexpr std::int64_t bytes_of(CacheCode code) {
    return code == CacheCode::fp32 ? 4 : code == CacheCode::bf16 ? 2 : 1;
}

// Keys and values of one layer: keys [blocks, heads, key_dim, block_size], values [blocks, heads, block_size, row], where
// `row` is value_dim rounded up to 16; scales of int8 [blocks, heads, block_size].
struct CacheOfLayer {
    char* keys;
    char* values;
    float* key_scales;
    float* value_scales;
    CacheCode code;
    std::int64_t blocks, heads, key_dim, value_dim, block_size;

    std::int64_t value_row() const { return (value_dim + 15) / 16 * 16; }
};

struct AttentionJob {
    CacheOfLayer cache;
    const void* query;  // [tokens, heads, key_dim], `query_stride` elements from one token to the next
    std::int64_t query_stride;
    void* out;          // [tokens, heads, value_dim]
    bool is_bf16;       // query and out; else float32
    std::int64_t heads;
    const std::int32_t* block_table;  // [sequences, table_stride]
    std::int64_t table_stride;
    const std::int32_t* query_start;      // [sequences + 1]
    const std::int32_t* context_lengths;  // [sequences]
    float scaling, softcap;               // softcap 0: none
    std::int64_t window, chunk;           // 0: none
    const float* sinks;                   // [heads], or nullptr

    std::int64_t group() const { return heads / cache.heads; }
};

// Rows of a sequence that share a head of the cache. Row r is query r / group, head r % group of the group.
struct AttentionPart {
    std::int64_t sequence, cache_head, first, count;
};

constexpr std::int64_t kPartRows = 48;  // most rows of an AttentionPart
constexpr std::int64_t kTileKeys = 128;

struct WriteJob {
    CacheOfLayer cache;
    const void* key;    // [tokens, heads, key_dim]
    const void* value;  // [tokens, heads, value_dim]
    std::int64_t key_stride, value_stride;  // elements from one token to the next
    bool is_bf16;
    const std::int64_t* slots;  // [tokens]; negative: skipped
    std::int64_t tokens;
};

// residual += x, if there is a residual; out = rms_norm(residual or x) * weight, of `rows` rows. Rows of x may be the heads
// of tokens that are `stride` elements apart, `heads` of each; they are contiguous if `stride` is heads * features.
struct NormJob {
    const void* x;
    void* residual;
    void* out;
    const float* weight;
    bool is_bf16;
    std::int64_t features;
    float epsilon;
    std::int64_t heads, stride;
};

// out = a + b
struct AddJob {
    const void* a;
    const void* b;
    void* out;
    bool is_bf16;
};

// Rotates the first rotary_dim features of every head in place; halves are paired. cosines, sines: [tokens, rotary_dim].
struct RotaryJob {
    void* x;
    bool is_bf16;
    std::int64_t token_stride, heads, head_dim, rotary_dim;
    const float* cosines;
    const float* sines;
};

enum class Activation : int { silu = 0, gelu_tanh = 1 };

// out[r, i] = activation(gate_up[r, i]) * gate_up[r, features + i]
struct GateJob {
    const void* gate_up;
    void* out;
    bool is_bf16;
    std::int64_t features;
    Activation activation;
};

constexpr std::int64_t kPartTokens = 64;  // tokens of a vocabulary whose maximum and sum of weights are stored

// Kernels of one instruction set.
struct InferenceSet {
    const char* name;
    // Divides rows into blocks. Returns the number of blocks, and in `bytes` the size of their packed input. `blocks`
    // has room for one block for each row.
    std::int64_t (*divide_rows)(const GemmJob&, RowBlock* blocks, std::int64_t* bytes);
    // Writes the packed input of a block to `packed` + offset, which is aligned to 64 bytes.
    void (*pack_rows)(const GemmJob&, const RowBlock&, char* packed);
    // Computes the outputs of panels [begin, end) for blocks [first, last).
    void (*multiply)(const GemmJob&, const RowBlock* blocks, std::int64_t first, std::int64_t last, const char* packed,
                     std::int64_t begin, std::int64_t end);
    // Number of panels that `multiply` computes best in one call.
    std::int64_t (*panel_group)(const GemmJob&);
    // Reads memory once, as fast as possible: the speed that products are compared with.
    std::uint64_t (*read_words)(const char* from, std::int64_t bytes);
    // Computes a part of attention. `scratch` has attention_scratch(job) bytes, aligned to 64.
    // Computes `count` parts. While the last keys of one are computed, the first ones of the next are requested.
    void (*attend)(const AttentionJob&, const AttentionPart* parts, std::int64_t count, char* scratch);
    std::int64_t (*attention_scratch)(const AttentionJob&);
    // Stores the tokens of heads [begin, end).
    void (*write_heads)(const WriteJob&, std::int64_t begin, std::int64_t end);
    // Normalizes rows [begin, end).
    void (*normalize_rows)(const NormJob&, std::int64_t begin, std::int64_t end);
    // Adds elements [begin, end).
    void (*add_elements)(const AddJob&, std::int64_t begin, std::int64_t end);
    // Rotates tokens [begin, end); applies gates to rows [begin, end).
    void (*rotate_rows)(const RotaryJob&, std::int64_t begin, std::int64_t end);
    void (*gate_rows)(const GateJob&, std::int64_t begin, std::int64_t end);
    // Passes over the scores of a vocabulary; see sampling.hpp.
    float (*find_maxima)(const float* scores, std::int64_t count, float* maxima);
    void (*weigh)(const float* scores, std::int64_t count, float greatest, float temperature, float* weights, float* sums);
    std::int64_t (*collect)(const float* values, std::int64_t count, float least, std::int32_t* ids);
};

extern const InferenceSet kInferenceBaseline;
#if defined(__x86_64__)
extern const InferenceSet kInferenceAvx2;
extern const InferenceSet kInferenceAvx512;
extern const InferenceSet kInferenceAvxVnni;
extern const InferenceSet kInferenceAvx512Vnni;
extern const InferenceSet kInferenceAvx512Bf16;
#endif

}  // namespace windlass
