#include "tests/comm/cases/parts_cases.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <stdexcept>

#include "comm/collectives.h"
#include "comm/shm/shared_memory.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"

namespace tessera::testing {

namespace {

constexpr float kUntouched = -77;

struct DrawnPart {
  int64_t offset;
  int64_t numel;
  int64_t present;  // elements of the tensor, at most group size x numel
};

struct Drawn {
  std::vector<DrawnPart> parts;
  int64_t numel = 0;  // of a rank
};

/// The same on all ranks.
Drawn draw_parts(uint64_t seed, int64_t largest, int64_t ranks) {
  std::mt19937_64 generator(seed);
  const auto up_to = [&](int64_t most) { return static_cast<int64_t>(generator() % (most + 1)); };
  Drawn drawn;
  for (int64_t count = up_to(5); count > 0; --count) {
    drawn.numel += up_to(3);
    const int64_t numel = up_to(largest);
    const int64_t present = up_to(2) == 0 ? up_to(ranks * numel) : ranks * numel;
    drawn.parts.push_back({drawn.numel, numel, present});
    drawn.numel += numel;
  }
  drawn.numel += up_to(3);
  return drawn;
}

/// Elements of rank `rank` that a part's tensor has.
int64_t present_for(const DrawnPart& part, int64_t rank) {
  return std::clamp<int64_t>(part.present - rank * part.numel, 0, part.numel);
}

void check_all_gather(const Drawn& drawn, at::ScalarType dtype, at::ScalarType part_dtype) {
  const auto& group = default_group();
  const int64_t ranks = get_world_size();
  const auto input = at::randn({drawn.numel}, make_generator(get_rank())).to(dtype);
  const auto flat = at::zeros({ranks, drawn.numel}, dtype);
  all_gather(flat, input, group);
  const auto expected = flat.to(part_dtype);
  std::vector<TensorSegment> parts;
  for (const auto& part : drawn.parts) {
    parts.push_back(
        {part.offset, part.numel, at::full({part.present + 1}, kUntouched, part_dtype).narrow(0, 0, part.present)});
  }
  all_gather_segments_async(std::make_shared<const std::vector<TensorSegment>>(parts), input, group).wait();
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& part = drawn.parts[i];
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t present = present_for(part, rank);
      expect_bit_equal(parts[i].tensor.narrow(0, std::min(rank * part.numel, part.present), present),
                       expected[rank].narrow(0, part.offset, present));
    }
    const auto behind = parts[i].tensor.as_strided({1}, {1}, part.present);
    expect_equal(behind.item<float>(), kUntouched);
  }
}

struct ScatterOptions {
  bool first_is_flat = false;  // rank 0 calls with one tensor
  bool is_shared = false;      // parts lie where peers may read them directly
};

void check_reduce_scatter(const Drawn& drawn, at::ScalarType dtype, ScatterOptions options) {
  const auto& group = default_group();
  const int64_t ranks = get_world_size();
  const auto flat = at::zeros({ranks, drawn.numel}, dtype);
  std::vector<TensorSegment> parts;
  for (const auto& part : drawn.parts) {
    // One of the ranks may have nothing at all.
    const bool is_missing = part.present % 5 == 1 && get_rank() == part.present % ranks;
    auto tensor = is_missing ? at::Tensor() : at::randn({part.present}, make_generator(100 + get_rank())).to(dtype);
    for (int64_t rank = 0; rank < ranks && tensor.defined(); ++rank) {
      const int64_t present = present_for(part, rank);
      flat[rank]
          .narrow(0, part.offset, present)
          .copy_(tensor.narrow(0, std::min(rank * part.numel, part.present), present));
    }
    if (options.is_shared && tensor.defined()) {
      tensor = shared_zeros(tensor.numel(), dtype).copy_(tensor);
    }
    parts.push_back({part.offset, part.numel, std::move(tensor)});
  }
  const auto shared = std::make_shared<const std::vector<TensorSegment>>(std::move(parts));
  for (const auto op : {ReduceOp::Sum, ReduceOp::Avg}) {
    const auto expected = at::full({drawn.numel}, kUntouched, dtype), actual = expected.clone();
    reduce_scatter(expected, flat, op, group);
    if (options.first_is_flat && get_rank() == 0) {
      reduce_scatter(actual, flat, op, group);
    } else {
      reduce_scatter_segments_async(actual, shared, op, group).wait();
    }
    expect_bit_equal(actual, expected);
  }
}

}  // namespace

void check_segments_against_flat(uint64_t seed, int64_t largest, at::ScalarType dtype) {
  try {
    const Drawn drawn = draw_parts(seed, largest, get_world_size());
    for (const auto part_dtype : {dtype, at::kFloat, at::kHalf, at::kDouble}) {
      check_all_gather(drawn, dtype, part_dtype);
    }
    check_reduce_scatter(drawn, dtype, {});
    check_reduce_scatter(drawn, dtype, {.first_is_flat = true});
    check_reduce_scatter(drawn, dtype, {.is_shared = true});
  } catch (const std::exception& error) {
    throw std::runtime_error(
        fmt::format("seed {}, largest {}, {}: {}", seed, largest, c10::toString(dtype), error.what()));
  }
}

}  // namespace tessera::testing
