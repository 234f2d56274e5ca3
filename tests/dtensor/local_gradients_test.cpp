// What gradients are when they pass to_local and from_local.

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

using namespace tessera;

namespace {

at::Tensor ramp(std::vector<int64_t> sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kFloat).reshape(sizes);
}

at::Tensor leaf(const at::Tensor& value, const DeviceMesh& mesh) {
  return distribute_tensor(value, mesh, {Shard(0)}).set_requires_grad(true);
}

}  // namespace

TEST_CASE("a gradient of one number for all elements is accumulated", "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto x = leaf(ramp({3, 2}), mesh);
    for (int pass = 0; pass < 2; ++pass) {
      to_local(x).sum().backward();
    }
    expect_bit_equal(full_tensor(x.grad()), at::full({3, 2}, 2.f));
  });
}
