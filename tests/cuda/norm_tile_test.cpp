// What each thread of the norm kernels adds up, run by loops in place of a GPU, against ATen.

#include "cuda/norm_tile.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "third_party/catch2/catch.h"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;

template <NormKind kKind, typename Sum>
Sum tree(std::vector<Sum> sums) {
  for (int half = kThreads / 2; half > 0; half /= 2) {
    for (int thread = 0; thread < kThreads; ++thread) {
      combine_step<kKind>(sums.data(), half, thread);
    }
  }
  return sums[0];
}

/// Both kernels, over tables of at most `a_table` tensors and `blocks` thread blocks.
template <typename T, typename Sum, NormKind kKind>
double norm_on_cpu(const std::vector<at::Tensor>& tensors, int a_table, int64_t blocks) {
  std::vector<NormTable> tables(1);
  for (const auto& tensor : tensors) {
    if (tables.back().count == a_table) {
      tables.emplace_back();
    }
    tables.back().add(tensor.const_data_ptr(), tensor.numel());
  }
  std::vector<Sum> partials;
  for (const auto& table : tables) {
    for (int64_t block = 0; block < std::min(blocks, table.tiles()); ++block) {
      std::vector<Sum> sums(kThreads, 0);
      for (int64_t tile = block; tile < table.tiles(); tile += blocks) {
        for (int thread = 0; thread < kThreads; ++thread) {
          sums[thread] = combine<kKind>(sums[thread], norm_of_tile<T, Sum, kKind>(table, tile, thread, kThreads));
        }
      }
      partials.push_back(tree<kKind>(std::move(sums)));
    }
  }
  std::vector<Sum> sums(kThreads, 0);
  for (int thread = 0; thread < kThreads; ++thread) {
    sums[thread] = norm_of_partials<Sum, kKind>(partials.data(), partials.size(), thread, kThreads);
  }
  return tree<kKind>(std::move(sums));
}

/// Sums of |x| and of squares, and the largest |x|, in float64.
double expected_norm(const std::vector<at::Tensor>& tensors, NormKind kind) {
  double result = 0;
  for (const auto& tensor : tensors) {
    const auto wide = tensor.to(at::kDouble).abs();
    if (kind == NormKind::Inf) {
      result = wide.numel() == 0 ? result : std::max(result, wide.max().item<double>());
    } else {
      result += (kind == NormKind::L2 ? wide * wide : wide).sum().item<double>();
    }
  }
  return result;
}

std::vector<at::Tensor> random_tensors(at::ScalarType dtype) {
  std::vector<at::Tensor> tensors;
  for (const int64_t numel : {1, 0, 7, 8192, 8193, 5, 30000, 4096}) {
    tensors.push_back(at::randn({numel}).to(dtype));
    // One that begins at an odd address, which has no wide accesses.
    tensors.push_back(at::randn({numel + 1}).to(dtype).narrow(0, 1, numel));
  }
  return tensors;
}

template <typename T, typename Sum>
void check_kinds(at::ScalarType dtype) {
  const auto tensors = random_tensors(dtype);
  for (const int a_table : {1, 5, 100}) {
    for (const int64_t blocks : {1, 3, 1024}) {
      CAPTURE(dtype, a_table, blocks);
      const auto close = [&](double actual, NormKind kind) {
        CHECK(actual == Catch::Approx(expected_norm(tensors, kind)).epsilon(1e-5));
      };
      close(norm_on_cpu<T, Sum, NormKind::L1>(tensors, a_table, blocks), NormKind::L1);
      close(norm_on_cpu<T, Sum, NormKind::L2>(tensors, a_table, blocks), NormKind::L2);
      CHECK(norm_on_cpu<T, Sum, NormKind::Inf>(tensors, a_table, blocks) == expected_norm(tensors, NormKind::Inf));
    }
  }
}

TEST_CASE("norms of many tensors, in tables and blocks of any number") {
  check_kinds<float, float>(at::kFloat);
  check_kinds<c10::BFloat16, float>(at::kBFloat16);
  check_kinds<c10::Half, float>(at::kHalf);
  check_kinds<double, double>(at::kDouble);
}

TEST_CASE("every element counts once") {
  // Whole numbers, so that sums in float are exact in any order.
  const std::vector<at::Tensor> tensors{at::full({8192 * 3 + 17}, 1.f), at::full({5}, -2.f), at::full({0}, 1.f)};
  CHECK(norm_on_cpu<float, float, NormKind::L1>(tensors, 100, 1024) == 8192 * 3 + 17 + 10);
  CHECK(norm_on_cpu<float, float, NormKind::L2>(tensors, 100, 2) == 8192 * 3 + 17 + 20);
  CHECK(norm_on_cpu<float, float, NormKind::Inf>(tensors, 100, 1024) == 2);
  CHECK(norm_on_cpu<float, float, NormKind::L2>({at::full({0}, 1.f)}, 100, 1024) == 0);
}

TEST_CASE("a NaN or an infinity anywhere is in the result") {
  for (const int64_t place : {0, 3, 8191, 8192, 9999}) {
    CAPTURE(place);
    auto tensor = at::randn({10000});
    tensor[place] = std::numeric_limits<float>::quiet_NaN();
    CHECK(std::isnan(norm_on_cpu<float, float, NormKind::L1>({tensor}, 100, 1024)));
    CHECK(std::isnan(norm_on_cpu<float, float, NormKind::L2>({tensor}, 100, 1024)));
    CHECK(std::isnan(norm_on_cpu<float, float, NormKind::Inf>({tensor}, 100, 1024)));
    tensor[place] = -std::numeric_limits<float>::infinity();
    CHECK(std::isinf(norm_on_cpu<float, float, NormKind::Inf>({tensor}, 100, 1024)));
  }
}

TEST_CASE("a full table") {
  NormTable table;
  float x[1] = {2};
  while (!table.full()) {
    table.add(x, 1);
  }
  CHECK(table.tiles() == NormTable::kMaxTensors);
  float sum = 0;
  for (int64_t tile = 0; tile < table.tiles(); ++tile) {
    sum += norm_of_tile<float, float, NormKind::L2>(table, tile, 0, 1);
  }
  CHECK(sum == 4 * NormTable::kMaxTensors);
}

}  // namespace
}  // namespace tessera::cuda
