// Attention over a paged cache, for the instruction set that the file is compiled for.
//
// The softmax is computed online over tiles of keys at fixed positions of the sequence. Keys that are not visible to a
// row have weight 0, and a tile without visible keys scales the row by 1: neither changes the row's bits. So a row does
// not depend on the rows beside it, nor on the division of a prompt into chunks.
#pragma once

#include <cstring>

#include "micro_kernel.hpp"

namespace {

using windlass::AttentionJob;
using windlass::AttentionPart;
using windlass::CacheCode;
using windlass::CacheOfLayer;
using windlass::kPartRows;
using windlass::kTileKeys;
using windlass::WriteJob;

constexpr std::int64_t kMostPadded = kPartRows + 12;

// Loads kLanes elements of the cache as float32.
template <CacheCode kCode>
WINDLASS_INLINE F load_cached(const char* from) {
    if constexpr (kCode == CacheCode::fp32) {
        return load<F>(from);
    } else if constexpr (kCode == CacheCode::bf16) {
        return (F)(__builtin_convertvector(load<Half>(from), U) << 16);
    } else {
#if defined(__AVX512F__)
        return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
        return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
        typedef std::int8_t Signed __attribute__((vector_size(kLanes)));
        return __builtin_convertvector(__builtin_convertvector(load<Signed>(from), I), F);
#endif
    }
}

// Computes scores[row][key] for kRows rows and kGroups groups of 16 keys. The packed query has all rows of a feature
// together.
template <CacheCode kCode, int kRows, int kGroups>
void score_keys(const char* const* groups, std::int64_t feature_bytes, const float* query, std::int64_t features,
                float* scores) {
    constexpr int kColumns = kGroups * kVectors;
    constexpr std::int64_t kBytes = windlass::bytes_of(kCode);
    const char* at[kGroups];
    F sums[kRows][kColumns];
#pragma GCC unroll 16
    for (int group = 0; group < kGroups; ++group) at[group] = groups[group];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) sums[row][column] = F{};
    }
    for (std::int64_t feature = 0; feature < features; ++feature) {
        F keys[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            keys[column] = load_cached<kCode>(at[column / kVectors] + feature * feature_bytes +
                                              (column % kVectors) * kLanes * kBytes);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            const F spread = all(query[feature * kRows + row]);
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                sums[row][column] = multiply_add(spread, keys[column], sums[row][column]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            store(scores + row * kTileKeys + column * kLanes, sums[row][column]);
        }
    }
}

// Multiplies kRows rows of sums by `scale`, and adds weights[row][key] * value[key] for keys [begin, end) of a tile.
// `groups` has the first value of each 16 keys of the tile.
template <CacheCode kCode, int kRows, int kParts>
void add_values(const char* const* groups, std::int64_t row_bytes, const float* weights, std::int64_t begin,
                std::int64_t end, const float* scale, float* sums_at, std::int64_t stride) {
    constexpr int kColumns = kParts * kVectors;
    constexpr std::int64_t kBytes = windlass::bytes_of(kCode);
    F sums[kRows][kColumns];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            sums[row][column] = load<F>(sums_at + row * stride + column * kLanes) * all(scale[row]);
        }
    }
    for (std::int64_t key = begin; key < end; ++key) {
        const char* from = groups[key / 16] + key % 16 * row_bytes;
        F values[kColumns];
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            values[column] = load_cached<kCode>(from + column * kLanes * kBytes);
        }
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
            const F spread = all(weights[row * kTileKeys + key]);
#pragma GCC unroll 16
            for (int column = 0; column < kColumns; ++column) {
                sums[row][column] = multiply_add(spread, values[column], sums[row][column]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int column = 0; column < kColumns; ++column) {
            store(sums_at + row * stride + column * kLanes, sums[row][column]);
        }
    }
}

// Memory of one AttentionPart, in floats.
struct AttentionScratch {
    float *query, *scores, *sums, *most, *total, *scale;

    static std::int64_t floats(const AttentionJob& job) {
        return kMostPadded * (job.cache.key_dim + kTileKeys + job.cache.value_row() + 1 + kPanel + 1) + 64;
    }

    AttentionScratch(const AttentionJob& job, char* memory) {
        scores = reinterpret_cast<float*>(memory);
        sums = scores + kMostPadded * kTileKeys;
        total = sums + kMostPadded * job.cache.value_row();
        query = total + kMostPadded * kPanel;
        most = query + kMostPadded * job.cache.key_dim;
        scale = most + kMostPadded;
    }
};

// Keys [lowest, highest] that are visible to a row.
struct VisibleKeys {
    std::int64_t lowest, highest;
};

inline VisibleKeys visible_keys(const AttentionJob& job, const AttentionPart& part, std::int64_t row) {
    const std::int64_t queries = job.query_start[part.sequence + 1] - job.query_start[part.sequence];
    const std::int64_t position =
        job.context_lengths[part.sequence] - queries + (part.first + row) / job.group();
    std::int64_t lowest = 0;
    if (job.window > 0 && position - job.window + 1 > lowest) lowest = position - job.window + 1;
    if (job.chunk > 0 && position - position % job.chunk > lowest) lowest = position - position % job.chunk;
    return {lowest, position};
}

// Element of the query or the output at which a row begins.
inline std::int64_t row_offset(const AttentionJob& job, const AttentionPart& part, std::int64_t row,
                               std::int64_t token_stride, std::int64_t features) {
    const std::int64_t token = job.query_start[part.sequence] + (part.first + row) / job.group();
    const std::int64_t head = part.cache_head * job.group() + (part.first + row) % job.group();
    return token * token_stride + head * features;
}

inline void pack_query(const AttentionJob& job, const AttentionPart& part, std::int64_t first, std::int64_t count,
                       std::int64_t padded, float* to) {
    const std::int64_t features = job.cache.key_dim;
    for (std::int64_t row = 0; row < padded; ++row) {
        if (row >= count) {
            for (std::int64_t i = 0; i < features; ++i) to[i * padded + row] = 0;
            continue;
        }
        const std::int64_t from = row_offset(job, part, first + row, job.query_stride, features);
        if (job.is_bf16) {
            const auto* line = static_cast<const std::uint16_t*>(job.query) + from;
            for (std::int64_t i = 0; i < features; ++i) to[i * padded + row] = float_of(line[i]);
        } else {
            const auto* line = static_cast<const float*>(job.query) + from;
            for (std::int64_t i = 0; i < features; ++i) to[i * padded + row] = line[i];
        }
    }
}

// Address of the first element of each 16 keys of a tile. Addresses of keys that are visible to no row are not set.
struct TileOfCache {
    std::int64_t start, begin, end;  // position of the tile; its keys [begin, end) are visible to some row
    const char* keys[kTileKeys / 16];
    const char* values[kTileKeys / 16];
    const float* key_scales[kTileKeys / 16];
    const float* value_scales[kTileKeys / 16];

    std::int64_t first_group() const { return begin / 16; }
    std::int64_t last_group() const { return (end + 15) / 16; }

    TileOfCache(const AttentionJob& job, const AttentionPart& part, std::int64_t start, std::int64_t begin,
                std::int64_t end)
        : start(start), begin(begin), end(end) {
        const CacheOfLayer& cache = job.cache;
        const std::int64_t bytes = windlass::bytes_of(cache.code);
        const std::int32_t* table = job.block_table + part.sequence * job.table_stride;
        for (std::int64_t group = first_group(); group < last_group(); ++group) {
            const std::int64_t position = start + group * 16, offset = position % cache.block_size;
            const std::int64_t block = table[position / cache.block_size] * cache.heads + part.cache_head;
            keys[group] = cache.keys + (block * cache.key_dim * cache.block_size + offset) * bytes;
            values[group] = cache.values + (block * cache.block_size + offset) * cache.value_row() * bytes;
            if (cache.code == CacheCode::int8) {
                key_scales[group] = cache.key_scales + block * cache.block_size + offset;
                value_scales[group] = cache.value_scales + block * cache.block_size + offset;
            }
        }
    }
};

// Prefetches the lines of a tile. Each 16 keys may lie on other pages, which no prefetcher of the processor predicts.
inline void request_tile(const AttentionJob& job, const TileOfCache& tile) {
    constexpr std::int64_t kLine = 64;
    const CacheOfLayer& cache = job.cache;
    const std::int64_t bytes = windlass::bytes_of(cache.code), feature_bytes = cache.block_size * bytes;
    const std::int64_t line_features = feature_bytes < kLine ? kLine / feature_bytes : 1;
    for (std::int64_t group = tile.first_group(); group < tile.last_group(); ++group) {
        for (std::int64_t feature = 0; feature < cache.key_dim; feature += line_features) {
            __builtin_prefetch(tile.keys[group] + feature * feature_bytes, 0, 2);
        }
        for (std::int64_t at = 0; at < 16 * cache.value_row() * bytes; at += kLine) {
            __builtin_prefetch(tile.values[group] + at, 0, 2);
        }
    }
}

WINDLASS_INLINE I lane_numbers() {
    I lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
    return lanes;
}

inline float largest_of(F values) {
    float largest = values[0];
    for (int lane = 1; lane < kLanes; ++lane) largest = values[lane] > largest ? values[lane] : largest;
    return largest;
}

// Turns the scores of a row into weights, relative to the largest score so far; sets the factor for its earlier sums.
inline void weigh_row(const AttentionJob& job, const TileOfCache& tile, VisibleKeys visible, float* scores, float* most,
                      float* total, float* scale) {
    const std::int64_t first = tile.first_group() * kVectors, last = tile.last_group() * kVectors;
    const bool coded = job.cache.code == CacheCode::int8;
    const F minus_infinity = all(-__builtin_inff());
    const auto lowest = static_cast<std::int32_t>(visible.lowest - tile.start < -1 ? -1 : visible.lowest - tile.start);
    const auto highest = static_cast<std::int32_t>(
        visible.highest - tile.start > kTileKeys ? kTileKeys : visible.highest - tile.start);
    F largest = all(*most);
    for (std::int64_t at = first; at < last; ++at) {
        F value = load<F>(scores + at * kLanes) * all(job.scaling);
        if (coded) value = value * load<F>(tile.key_scales[at / kVectors] + at % kVectors * kLanes);
        if (job.softcap > 0) value = all(job.softcap) * hyperbolic_tangent(value / all(job.softcap));
        const I key = lane_numbers() + static_cast<std::int32_t>(at * kLanes);
        value = select((I)((key >= lowest) & (key <= highest)), value, minus_infinity);
        largest = select((I)(value > largest), value, largest);
        store(scores + at * kLanes, value);
    }
    const float now = largest_of(largest);
    // Before the first visible key both are -infinity; the difference of those would not be a number.
    const float base = now == -__builtin_inff() ? 0.0f : now;
    F old = exponential(all(*most - base));
    *scale = old[0];
    for (int i = 0; i < kVectors; ++i) store(total + i * kLanes, load<F>(total + i * kLanes) * old);
    for (std::int64_t at = first; at < last; ++at) {
        const F weight = exponential(load<F>(scores + at * kLanes) - all(base));
        float* sums = total + at % kVectors * kLanes;
        store(sums, load<F>(sums) + weight);
        const F scaled = coded ? weight * load<F>(tile.value_scales[at / kVectors] + at % kVectors * kLanes) : weight;
        // The scale of a key that is not visible to any row is undefined.
        store(scores + at * kLanes, coded ? select((I)(weight > F{}), scaled, F{}) : weight);
    }
    *most = now;
}

template <CacheCode kCode, int kRows>
void attend_rows(const AttentionJob& job, const AttentionPart& part, const TileOfCache& tile, std::int64_t first,
                 std::int64_t count, const AttentionScratch& scratch) {
    constexpr int kBeside = panels_for(kRows, 2) > 4 ? 4 : panels_for(kRows, 2);
    const CacheOfLayer& cache = job.cache;
    float* scores = scratch.scores;
    const float* query = scratch.query + first * cache.key_dim;
    const std::int64_t feature_bytes = cache.block_size * windlass::bytes_of(kCode);
    std::int64_t group = tile.first_group();
    for (; group + kBeside <= tile.last_group(); group += kBeside) {
        score_keys<kCode, kRows, kBeside>(tile.keys + group, feature_bytes, query, cache.key_dim, scores + group * 16);
    }
    for (; group < tile.last_group(); ++group) {
        score_keys<kCode, kRows, 1>(tile.keys + group, feature_bytes, query, cache.key_dim, scores + group * 16);
    }
    for (std::int64_t row = 0; row < kRows; ++row) {
        if (row < count) {
            weigh_row(job, tile, visible_keys(job, part, first + row), scores + row * kTileKeys,
                      scratch.most + first + row, scratch.total + (first + row) * kPanel, scratch.scale + row);
        } else {
            std::memset(scores + row * kTileKeys, 0, 4 * kTileKeys);
            scratch.scale[row] = 0;
        }
    }
    const std::int64_t stride = cache.value_row(), row_bytes = stride * windlass::bytes_of(kCode);
    float* sums = scratch.sums + first * stride;
    std::int64_t at = 0;
    const char* values[kTileKeys / 16];
    const auto from = [&](std::int64_t feature) {
        for (std::int64_t i = tile.first_group(); i < tile.last_group(); ++i) {
            values[i] = tile.values[i] + feature * windlass::bytes_of(kCode);
        }
    };
    for (; at + kBeside * kPanel <= stride; at += kBeside * kPanel) {
        from(at);
        add_values<kCode, kRows, kBeside>(values, row_bytes, scores, tile.begin, tile.end, scratch.scale, sums + at,
                                          stride);
    }
    for (; at < stride; at += kPanel) {
        from(at);
        add_values<kCode, kRows, 1>(values, row_bytes, scores, tile.begin, tile.end, scratch.scale, sums + at, stride);
    }
}

template <CacheCode kCode>
void attend_tile(const AttentionJob& job, const AttentionPart& part, const TileOfCache& tile, std::int64_t first,
                 std::int64_t count, const AttentionScratch& scratch) {
    const std::int64_t padded = padded_rows(count);
    if (padded == 1) return attend_rows<kCode, 1>(job, part, tile, first, count, scratch);
    if (padded == 2) return attend_rows<kCode, 2>(job, part, tile, first, count, scratch);
    if constexpr (kMostRows >= 6) {
        if (padded == 4) return attend_rows<kCode, 4>(job, part, tile, first, count, scratch);
        if (padded == 6) return attend_rows<kCode, 6>(job, part, tile, first, count, scratch);
    }
    if constexpr (kMostRows >= 12) {
        if (padded == 8) return attend_rows<kCode, 8>(job, part, tile, first, count, scratch);
        attend_rows<kCode, 12>(job, part, tile, first, count, scratch);
    }
}

inline void finish_rows(const AttentionJob& job, const AttentionPart& part, const AttentionScratch& scratch) {
    const std::int64_t features = job.cache.value_dim, stride = job.cache.value_row();
    for (std::int64_t row = 0; row < part.count; ++row) {
        float total = 0;
        for (int lane = 0; lane < kPanel; ++lane) total += scratch.total[row * kPanel + lane];
        const float* sums = scratch.sums + row * stride;
        const std::int64_t to = row_offset(job, part, row, job.heads * features, features);
        if (job.is_bf16) {
            auto* out = static_cast<std::uint16_t*>(job.out) + to;
            for (std::int64_t i = 0; i < features; ++i) out[i] = bf16_of(sums[i] / total);
        } else {
            auto* out = static_cast<float*>(job.out) + to;
            for (std::int64_t i = 0; i < features; ++i) out[i] = sums[i] / total;
        }
    }
}

// Tiles of the keys that the rows of a part attend to.
struct TilesOfPart {
    const AttentionJob& job;
    const AttentionPart& part;
    std::int64_t lowest, highest;  // visible positions

    TilesOfPart(const AttentionJob& job, const AttentionPart& part)
        : job(job),
          part(part),
          lowest(visible_keys(job, part, 0).lowest),
          highest(visible_keys(job, part, part.count - 1).highest) {}

    std::int64_t beginning() const { return lowest / kTileKeys * kTileKeys; }

    TileOfCache at(std::int64_t start) const {
        const std::int64_t begin = lowest > start ? lowest - start : 0;
        const std::int64_t end = highest + 1 - start < kTileKeys ? highest + 1 - start : kTileKeys;
        return TileOfCache(job, part, start, begin, end);
    }

    // True if computing on a tile takes less time than loading it.
    bool is_decode() const { return part.count <= kMostRows; }

    void request(std::int64_t start) const {
        if (is_decode()) request_tile(job, at(start));
    }
};

// Computes a part whose first tile is requested, and requests the first tile of `next`, if there is one.
void attend_part(const AttentionJob& job, const TilesOfPart& tiles, const TilesOfPart* next, char* memory) {
    const AttentionPart& part = tiles.part;
    const AttentionScratch scratch(job, memory);
    for (std::int64_t row = 0; row < part.count; ++row) {
        const std::int64_t head = part.cache_head * job.group() + (part.first + row) % job.group();
        scratch.most[row] = job.sinks != nullptr ? job.sinks[head] : -__builtin_inff();
        float* total = scratch.total + row * kPanel;
        std::memset(total, 0, 4 * kPanel);
        if (job.sinks != nullptr) total[0] = 1;
    }
    const std::int64_t last_block = (part.count - 1) / kMostRows * kMostRows;
    std::memset(scratch.sums, 0, 4 * (last_block + padded_rows(part.count - last_block)) * job.cache.value_row());
    // Blocks of rows begin at multiples of kMostRows, so that their padding lies behind the last row.
    for (std::int64_t first = 0; first < part.count; first += kMostRows) {
        const std::int64_t count = part.count - first < kMostRows ? part.count - first : kMostRows;
        pack_query(job, part, first, count, padded_rows(count), scratch.query + first * job.cache.key_dim);
    }
    for (std::int64_t start = tiles.beginning(); start <= tiles.highest; start += kTileKeys) {
        const TileOfCache tile = tiles.at(start);
        if (start + kTileKeys <= tiles.highest) {
            tiles.request(start + kTileKeys);
        } else if (next != nullptr) {
            next->request(next->beginning());
        }
        for (std::int64_t first = 0; first < part.count; first += kMostRows) {
            const std::int64_t count = part.count - first < kMostRows ? part.count - first : kMostRows;
            if (visible_keys(job, part, first + count - 1).highest < start) continue;  // tile not visible to any row
            switch (job.cache.code) {
                case CacheCode::fp32:
                    attend_tile<CacheCode::fp32>(job, part, tile, first, count, scratch);
                    break;
                case CacheCode::bf16:
                    attend_tile<CacheCode::bf16>(job, part, tile, first, count, scratch);
                    break;
                case CacheCode::int8:
                    attend_tile<CacheCode::int8>(job, part, tile, first, count, scratch);
                    break;
            }
        }
    }
    finish_rows(job, part, scratch);
}

void attend(const AttentionJob& job, const AttentionPart* parts, std::int64_t count, char* memory) {
    TilesOfPart(job, parts[0]).request(TilesOfPart(job, parts[0]).beginning());
    for (std::int64_t i = 0; i < count; ++i) {
        const TilesOfPart tiles(job, parts[i]), next(job, parts[i + 1 < count ? i + 1 : i]);
        attend_part(job, tiles, i + 1 < count ? &next : nullptr, memory);
    }
}

std::int64_t attention_scratch(const AttentionJob& job) { return 4 * AttentionScratch::floats(job); }

// Writes the int8 codes of a row: row / scale, rounded half to even. Returns the scale.
inline float quantize(const float* row, std::int64_t features, std::int8_t* codes) {
    float largest = 0;
    for (std::int64_t i = 0; i < features; ++i) {
        const float size = __builtin_fabsf(row[i]);
        largest = size > largest ? size : largest;
    }
    const float scale = largest / 127.0f, divisor = scale > 0 ? scale : 1.0f;
    for (std::int64_t i = 0; i < features; ++i) {
        const float rounded = (row[i] / divisor + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23 leaves no fraction
        codes[i] = static_cast<std::int8_t>(rounded > 127.0f ? 127.0f : rounded < -127.0f ? -127.0f : rounded);
    }
    return scale;
}

// Stores a row of floats in the cache, `stride` elements from one feature to the next. Returns the scale of an int8
// row.
inline float store_row(CacheCode code, const float* row, std::int64_t features, char* to, std::int64_t stride) {
    if (code == CacheCode::fp32) {
        auto* out = reinterpret_cast<float*>(to);
        for (std::int64_t i = 0; i < features; ++i) out[i * stride] = row[i];
    } else if (code == CacheCode::bf16) {
        auto* out = reinterpret_cast<std::uint16_t*>(to);
        for (std::int64_t i = 0; i < features; ++i) out[i * stride] = bf16_of(row[i]);
    } else {
        std::int8_t codes[1024];
        const float scale = quantize(row, features, codes);
        auto* out = reinterpret_cast<std::int8_t*>(to);
        for (std::int64_t i = 0; i < features; ++i) out[i * stride] = codes[i];
        return scale;
    }
    return 0;
}

// Returns the row of a token and head as floats; `room` receives a converted row.
inline const float* float_row(const void* from, bool is_bf16, std::int64_t first, std::int64_t features, float* room) {
    if (!is_bf16) return static_cast<const float*>(from) + first;
    const auto* line = static_cast<const std::uint16_t*>(from) + first;
    for (std::int64_t i = 0; i < features; ++i) room[i] = float_of(line[i]);
    return room;
}

void write_heads(const WriteJob& job, std::int64_t begin, std::int64_t end) {
    const CacheOfLayer& cache = job.cache;
    const std::int64_t bytes = windlass::bytes_of(cache.code);
    float room[1024];
    for (std::int64_t head = begin; head < end; ++head) {
        for (std::int64_t token = 0; token < job.tokens; ++token) {
            const std::int64_t slot = job.slots[token];
            if (slot < 0) continue;
            const std::int64_t block = slot / cache.block_size * cache.heads + head, offset = slot % cache.block_size;
            const std::int64_t place = block * cache.block_size + offset;
            const float* key = float_row(job.key, job.is_bf16, token * job.key_stride + head * cache.key_dim,
                                         cache.key_dim, room);
            const float key_scale = store_row(
                cache.code, key, cache.key_dim,
                cache.keys + (block * cache.key_dim * cache.block_size + offset) * bytes, cache.block_size);
            const float* value = float_row(job.value, job.is_bf16, token * job.value_stride + head * cache.value_dim,
                                           cache.value_dim, room);
            const float value_scale =
                store_row(cache.code, value, cache.value_dim, cache.values + place * cache.value_row() * bytes, 1);
            if (cache.code == CacheCode::int8) {
                cache.key_scales[place] = key_scale;
                cache.value_scales[place] = value_scale;
            }
        }
    }
}

}  // namespace
