// Initial values that a parameter has as a whole: those of one device, whatever the placements.

#include "dtensor/init.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include <functional>
#include <vector>

#include "dtensor/dtensor.h"
#include "dtensor/factories.h"
#include "dtensor/random/random.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

using Init = std::function<at::Tensor(at::Tensor)>;

struct Case {
  Init plain;
  Init sharded;
  std::vector<int64_t> sizes;
};

const std::vector<Case>& cases() {
  const Init orthogonal = [](at::Tensor x) { return torch::nn::init::orthogonal_(std::move(x), 1.5); };
  const Init sharded_orthogonal = [](at::Tensor x) { return init::orthogonal_(std::move(x), 1.5); };
  static const std::vector<Case> all = {
      {orthogonal, sharded_orthogonal, {5, 3}},
      {orthogonal, sharded_orthogonal, {3, 5}},
      {orthogonal, sharded_orthogonal, {2, 3, 2}},
      {torch::nn::init::eye_, init::eye_, {3, 5}},
      {torch::nn::init::eye_, init::eye_, {5, 1}},
      {torch::nn::init::dirac_, init::dirac_, {5, 3, 3}},
      {torch::nn::init::dirac_, init::dirac_, {1, 2, 3, 2}},
      {torch::nn::init::dirac_, init::dirac_, {3, 2, 1, 2, 2}},
  };
  return all;
}

void check_dtensors(const Case& one, const at::Tensor& expected, const DeviceMesh& mesh) {
  for (int64_t dim = -1; dim < expected.dim(); ++dim) {
    const Placements placed = {dim < 0 ? Placement(Replicate()) : Placement(Shard(dim))};
    auto parameter = empty(one.sizes, mesh, placed, expected.options().device(at::kCPU)).requires_grad_();
    tessera::manual_seed(7);
    const auto result = one.sharded(parameter);
    TESSERA_EXPECT(result.is_same(parameter) && parameter.is_leaf() && placements(parameter) == placed);
    expect_bit_equal(full_tensor(parameter).detach(), expected);
  }
}

}  // namespace

TEST_CASE("a parameter's initial values are those of one device", "[dtensor][init]") {
  const int ranks = GENERATE(1, 2, 3, 4);
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kBFloat16);
  for (const auto& one : cases()) {
    at::manual_seed(7);
    const auto expected = one.plain(at::empty(one.sizes, dtype));
    run_ranks(ranks, [&](int) { check_dtensors(one, expected, init_device_mesh(at::kCPU, {ranks})); });
  }
}

TEST_CASE("plain tensors go to libtorch's own", "[dtensor][init]") {
  for (const auto& one : cases()) {
    at::manual_seed(7);
    const auto expected = one.plain(at::empty(one.sizes));
    at::manual_seed(7);
    expect_bit_equal(one.sharded(at::empty(one.sizes)), expected);
  }
}

TEST_CASE("initial values of nothing, and of what has none", "[dtensor][init]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    expect_equal(init::orthogonal_(empty({0, 3}, mesh, {Shard(1)})).numel(), 0);
    expect_throws<ValueError>([&] { init::orthogonal_(empty({3}, mesh)); }, "init::orthogonal_: Float[3]");
    expect_throws<ValueError>([&] { init::eye_(empty({3, 2, 1}, mesh)); }, "a tensor of 2 to 2 dims");
    expect_throws<ValueError>([&] { init::dirac_(empty({3, 2}, mesh)); }, "a tensor of 3 to 5 dims");
    const auto pending = from_local(at::ones({2, 2}), mesh, {Partial()});
    expect_throws<ValueError>([&] { init::eye_(pending); }, "waits for a reduction");
  });
}

}  // namespace tessera
