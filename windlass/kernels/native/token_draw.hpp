// Draw of a token of a row of scores by temperature, top-k, top-p and min-p. A row's token does not depend on other rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "inference_job.hpp"

namespace windlass {

// A row of the array of settings that Python passes.
struct DrawSettings {
    double temperature, top_k, top_p, min_p, min_p_is_last, uniform;
};

// Memory for a row, which a thread keeps.
struct DrawBuffers {
    std::vector<float> maxima, sums;     // of each part
    std::vector<float> weights, values;  // of each token; some of the weights or scores
    std::vector<std::int32_t> ids;
};

class RowOfScores {
   public:
    RowOfScores(const InferenceSet& set, const float* scores, std::int64_t count, DrawBuffers& buffers)
        : set_(set),
          scores_(scores),
          count_(count),
          maxima_(buffers.maxima),
          sums_(buffers.sums),
          weights_(buffers.weights),
          values_(buffers.values),
          room_(buffers.ids) {
        maxima_.resize((count + kPartTokens - 1) / kPartTokens);
        greatest_ = set.find_maxima(scores, count, maxima_.data());
    }

    // The inverse of the cumulative distribution at `uniform`. The greatest score must be finite.
    std::int64_t draw(const DrawSettings& settings) {
        weights_.resize(count_);
        sums_.resize(maxima_.size());
        if (static_cast<std::int64_t>(room_.size()) < count_) room_.resize(count_);
        set_.weigh(scores_, count_, greatest_, static_cast<float>(settings.temperature), weights_.data(), sums_.data());
        has_all_ = true;
        const auto top_k = static_cast<std::int64_t>(settings.top_k);
        if (top_k > 0 && top_k < count_) keep(scores_, find_kth(top_k));
        if (settings.min_p > 0 && settings.min_p_is_last == 0) keep(weights_.data(), static_cast<float>(settings.min_p));
        if (settings.top_p < 1) keep_nucleus(settings.top_p);
        if (settings.min_p > 0 && settings.min_p_is_last != 0) keep(weights_.data(), static_cast<float>(settings.min_p));
        return has_all_ ? invert_all(settings.uniform) : invert_kept(settings.uniform);
    }

   private:
    // Keeps the tokens whose value is at least `least`.
    void keep(const float* values, float least) {
        if (has_all_) {
            num_kept_ = set_.collect(values, count_, least, room_.data());
            has_all_ = false;
        } else {
            drop([&](std::int32_t id) { return !(values[id] >= least); });
        }
    }

    template <class Excluded>
    void drop(const Excluded& excluded) {
        num_kept_ = std::remove_if(room_.begin(), room_.begin() + num_kept_, excluded) - room_.begin();
    }

    // The kept tokens in ascending order, unless all are kept.
    std::span<const std::int32_t> kept() const { return {room_.data(), static_cast<std::size_t>(num_kept_)}; }

    double weight_of_kept() const {
        double sum = 0;
        for (const std::int32_t id : kept()) sum += weights_[id];
        return sum;
    }

    double weight_of_all() const {
        double sum = 0;
        for (const float part : sums_) sum += part;
        return sum;
    }

    // The score that `number` tokens reach: at least as many parts have a maximum of at least `bound`.
    float find_kth(std::int64_t number) {
        float bound = -std::numeric_limits<float>::infinity();
        if (number <= static_cast<std::int64_t>(maxima_.size())) {
            values_ = maxima_;
            bound = greatest_of(number);
        }
        const std::int64_t found = set_.collect(scores_, count_, bound, room_.data());
        values_.clear();
        for (std::int64_t i = 0; i < found; ++i) values_.push_back(scores_[room_[i]]);
        return greatest_of(number);
    }

    // The `number`-th greatest of `values_`, which are reordered.
    float greatest_of(std::int64_t number) {
        std::nth_element(values_.begin(), values_.begin() + number - 1, values_.end(), std::greater<float>());
        return values_[number - 1];
    }

    // Keeps the fewest likeliest tokens with at least `top_p` of the weight of all kept tokens; of equally likely ones
    // the first.
    void keep_nucleus(double top_p) {
        const double total = has_all_ ? weight_of_all() : weight_of_kept();
        const double mass = total * top_p;
        if (has_all_) {
            // All lower weights together are half of what the nucleus leaves out, so that it has none of them. Nearly all
            // tokens are dropped here.
            keep(weights_.data(), static_cast<float>((1 - top_p) * total / static_cast<double>(count_) / 2));
            if (weight_of_kept() < mass) {  // by rounding, where top_p is nearly 1
                has_all_ = true;
                keep(weights_.data(), 0.0f);
            }
        }
        values_.clear();
        for (const std::int32_t id : kept()) values_.push_back(weights_[id]);
        const Lowest lowest = find_lowest(mass);
        std::int64_t left = lowest.ties;
        drop([&](std::int32_t id) {
            return weights_[id] < lowest.weight || (weights_[id] == lowest.weight && left-- <= 0);
        });
    }

    struct Lowest {
        float weight;
        std::int64_t ties;
    };

    // The lowest weight of the likeliest of `values_` that have `mass` together, and the number of them that have it. A
    // selection like that of std::nth_element, by weight in place of number.
    Lowest find_lowest(double mass) {
        std::uint64_t random = 0;  // pivots at fixed places take quadratic time for some smooth distributions
        double above = 0;  // sum of the weights before `begin`, which belong to the nucleus
        auto begin = values_.begin(), end = values_.end();
        for (;;) {
            const auto size = static_cast<std::uint64_t>(end - begin);
            const auto any = [&] {
                random = random * 6364136223846793005u + 1442695040888963407u;
                return begin[static_cast<std::ptrdiff_t>((random >> 33) % size)];
            };
            const float a = any(), b = any(), c = any();
            const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
            const auto equal = std::partition(begin, end, [&](float weight) { return weight > pivot; });
            const auto lower = std::partition(equal, end, [&](float weight) { return weight == pivot; });
            double heavier = above;
            for (auto one = begin; one != equal; ++one) heavier += *one;
            if (heavier >= mass && equal != begin) {
                end = equal;
                continue;
            }
            std::int64_t ties = 1;
            const std::int64_t most = lower - equal;
            while (ties < most && heavier + static_cast<double>(ties) * pivot < mass) ++ties;
            const double sum = heavier + static_cast<double>(ties) * pivot;
            if (sum >= mass || lower == end || pivot == 0) return {pivot, ties};
            above = sum;
            begin = lower;
        }
    }

    std::int64_t invert_all(double uniform) const {
        const double target = uniform * weight_of_all();
        double before = 0;
        std::int64_t chosen = 0;
        double chosen_before = 0;
        for (std::size_t part = 0; part < sums_.size(); ++part) {
            if (sums_[part] > 0) {  // rounding must not lead past the last weight above 0
                chosen = static_cast<std::int64_t>(part);
                chosen_before = before;
            }
            before += sums_[part];
            if (before > target) break;
        }
        double cumulative = chosen_before;
        std::int64_t last = chosen * kPartTokens;
        for (std::int64_t id = last; id < std::min(count_, (chosen + 1) * kPartTokens); ++id) {
            if (!(weights_[id] > 0)) continue;
            last = id;
            cumulative += weights_[id];
            if (cumulative > target) break;
        }
        return last;
    }

    std::int64_t invert_kept(double uniform) const {
        const double target = uniform * weight_of_kept();
        double cumulative = 0;
        std::int64_t last = 0;
        for (const std::int32_t id : kept()) {
            if (!(weights_[id] > 0)) continue;
            last = id;
            cumulative += weights_[id];
            if (cumulative > target) break;
        }
        return last;
    }

    const InferenceSet& set_;
    const float* scores_;
    std::int64_t count_;
    float greatest_ = 0;
    bool has_all_ = true;  // no token is excluded
    std::int64_t num_kept_ = 0;
    std::vector<float>&maxima_, &sums_, &weights_, &values_;
    std::vector<std::int32_t>& room_;
};

}  // namespace windlass
