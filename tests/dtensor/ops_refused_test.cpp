// Calls that one device refuses are refused on every rank, also on one whose kernel would see nothing of it.

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/nll_loss2d.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/zeros.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

TEST_CASE("sizes that do not fit together", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto cut = [&](std::vector<int64_t> sizes) { return distribute_tensor(at::ones(sizes), mesh, {Shard(0)}); };
    const auto whole = [&](std::vector<int64_t> sizes) {
      return distribute_tensor(at::ones(sizes), mesh, {Replicate()});
    };
    expect_throws<ValueError>([&] { at::dot(cut({4}), cut({3})); }, "two vectors of one length are needed");
    // Of one item the second rank has nothing.
    expect_throws<ValueError>([&] { at::conv2d(cut({1, 4, 5, 5}), whole({2, 3, 3, 3})); }, "the input 3 channels");
    expect_throws<ValueError>(
        [&] {
          at::conv2d(cut({1, 3, 5, 5}), whole({2, 3, 3, 3}), whole({3}));
        },
        "it needs 2 elements");
    expect_throws<ValueError>([&] { at::conv2d(cut({1, 3, 2, 2}), whole({2, 3, 3, 3})); }, "does not fit into input");
    expect_throws<ValueError>([&] { at::layer_norm(cut({1, 4}), {3}); }, "normalized_shape [3] of Float[1, 4]");
    expect_throws<ValueError>([&] { at::layer_norm(cut({1, 4}), {4}, whole({3})); }, "Float[3] as weight or bias");
    const auto targets = distribute_tensor(at::zeros({3, 2, 2}, at::kLong), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::nll_loss2d(cut({4, 3, 2, 2}), targets); }, "target Long[3, 2, 2]");
    expect_throws<ValueError>([&] { at::adaptive_avg_pool2d(cut({1}), {2, 2}); }, "an output size of 2 dims");
  });
}

TEST_CASE("arguments that no kernel takes", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = distribute_tensor(at::ones({1, 3}), mesh, {Shard(0)});
    const auto one = distribute_tensor(at::ones({1}), mesh, {Shard(0)});
    expect_throws<ValueError>([&] { at::embedding(x, one); }, "indices of Long or Int");
    expect_throws<ValueError>([&] { at::index_select(x, 1, one); }, "a vector of Long or Int");
    expect_throws<ValueError>([&] { at::flip(x, {1, -1}); }, "dim 1 is there twice");
    expect_throws<ValueError>([&] { at::roll(x, {1, 2}, {1}); }, "2 shifts for 1 dims");
  });
}
