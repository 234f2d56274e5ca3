#include "data/sample_index.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

using data::packed_sample;
using data::permuted;
using data::TokenRange;

std::vector<int64_t> permutation(int64_t size, uint64_t key) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < size; ++i) {
    values.push_back(permuted(i, size, key));
  }
  return values;
}

}  // namespace

TEST_CASE("each key gives a permutation of any number of indices") {
  for (const int64_t size : {1, 2, 3, 4, 5, 7, 16, 33, 100, 1000, 4097}) {
    for (const uint64_t key : {0, 1, 2}) {
      INFO(size << " indices, key " << key);
      auto values = permutation(size, key);
      std::sort(values.begin(), values.end());
      std::vector<int64_t> all(static_cast<size_t>(size));
      std::iota(all.begin(), all.end(), 0);
      CHECK(values == all);
    }
  }
  CHECK(permutation(1000, 1) != permutation(1000, 2));
  const int64_t huge = int64_t{1} << 62;
  CHECK(permuted(huge - 1, huge, 3) != permuted(huge - 2, huge, 3));
}

TEST_CASE("all orders are as likely") {
  std::map<std::vector<int64_t>, int> found;
  constexpr int kKeys = 4800, kOrders = 24;
  for (int key = 0; key < kKeys; ++key) {
    ++found[permutation(4, data::permutation_key(static_cast<uint64_t>(key), 0, 0))];
  }
  double chi_square = 0;
  for (const auto& [order, number] : found) {
    const double expected = static_cast<double>(kKeys) / kOrders;
    chi_square += (number - expected) * (number - expected) / expected;
  }
  CHECK(found.size() == kOrders);
  CHECK(chi_square < 49.7);  // with 23 degrees of freedom, one of a thousand is larger
}

TEST_CASE("neighbours end far apart") {
  constexpr int64_t kSize = 10'000;
  const auto values = permutation(kSize, 11);
  double distance = 0;
  int fixed = 0;
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    distance += static_cast<double>(std::abs(values[i + 1] - values[i])) / (kSize - 1);
    fixed += values[i] == static_cast<int64_t>(i);
  }
  CHECK(std::abs(distance - kSize / 3.0) < 100);  // four standard deviations
  CHECK(fixed < 8);
}

TEST_CASE("keys of seeds, sources and epochs differ") {
  std::map<uint64_t, int> keys;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    for (int64_t source = 0; source < 10; ++source) {
      for (int64_t epoch = 0; epoch < 10; ++epoch) {
        ++keys[data::permutation_key(seed, source, epoch)];
      }
    }
  }
  CHECK(keys.size() == 1000);
}

TEST_CASE("sources of weights 3 and 1 take turns") {
  std::string turns;
  for (int64_t i = 0; i < 8; ++i) {
    const auto turn = data::turn_of(i, {3, 1});
    turns += fmt::format("{}/{} ", turn.source, turn.index);
  }
  CHECK(turns == "0/0 0/1 0/2 1/0 0/3 0/4 0/5 1/1 ");
}

TEST_CASE("each source has its part of the turns, one sample after the other") {
  const std::vector<std::vector<double>> cases = {
      {1}, {0.3, 0.7}, {0.5, 0.3, 0.15, 0.05}, {1, 2, 3, 4, 5, 6}, {1e-6, 1}, std::vector<double>(10, 0.1)};
  for (const auto& weights : cases) {
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<int64_t> counts(weights.size());
    double deviation = 0;
    bool is_in_order = true;
    for (int64_t i = 0; i < 5000; ++i) {
      const auto turn = data::turn_of(i, weights);
      is_in_order = is_in_order && turn.index == counts[static_cast<size_t>(turn.source)]++;
      for (size_t k = 0; k < weights.size(); ++k) {
        const double expected = static_cast<double>(i + 1) * weights[k] / total;
        deviation = std::max(deviation, std::abs(static_cast<double>(counts[k]) - expected));
      }
    }
    INFO(weights.size() << " sources");
    CHECK(is_in_order);
    CHECK(deviation <= std::max(1.0, std::log(static_cast<double>(weights.size())) + 0.5));
  }
  const auto far = data::turn_of(int64_t{1} << 60, {1, 3});
  CHECK(std::abs(static_cast<double>(far.index) / static_cast<double>(int64_t{1} << 60) -
                 (far.source == 0 ? 0.25 : 0.75)) < 1e-9);
}

TEST_CASE("documents of 5, 2 and 6 tokens are packed into samples") {
  const std::vector<int64_t> starts = {0, 5, 7, 13};
  using Ranges = std::vector<TokenRange>;
  CHECK(data::num_packed_samples(starts, 8) == 2);
  CHECK((packed_sample(starts, 8, 0) == Ranges{{0, 5}, {5, 7}, {7, 8}}));
  CHECK((packed_sample(starts, 8, 1) == Ranges{{8, 13}}));
  CHECK(data::num_packed_samples(starts, 5) == 3);
  CHECK((packed_sample(starts, 5, 0) == Ranges{{0, 5}}));
  CHECK((packed_sample(starts, 5, 1) == Ranges{{5, 7}, {7, 10}}));
  CHECK((packed_sample(starts, 5, 2) == Ranges{{10, 13}}));
  CHECK(data::num_packed_samples(starts, 13) == 1);
  CHECK((packed_sample(starts, 13, 0) == Ranges{{0, 5}, {5, 7}, {7, 13}}));
  CHECK((packed_sample(starts, 100, 0) == Ranges{{0, 5}, {5, 7}, {7, 13}}));
}

}  // namespace tessera::testing
