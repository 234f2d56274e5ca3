// Where local elements lie in the whole tensor's memory, against the local tensors themselves.

#include "dtensor/random/shard_of_whole.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "third_party/catch2/catch.h"

namespace tessera {

namespace {

const std::vector<Placement> kFirst = {Shard(0), Shard(0, 1), Shard(1), Shard(2), Replicate()};

void check_places(const at::Tensor& x, const at::Tensor& whole) {
  const auto& spec = *dtensor_spec(x);
  const auto memory = at::empty_strided(spec.sizes(), spec.strides(), whole.options()).copy_(whole);
  const auto local = to_local(x);
  const auto shard = shard_of_whole(spec, local.strides());
  TESSERA_CHECK(ExpectationError, shard.has_value(), "{} is refused", spec.to_string());
  expect_equal(shard->whole_numel, whole.numel());
  if (local.numel() != 0) {
    expect_bit_equal(memory.as_strided(shard->sizes, shard->whole_strides, shard->whole_offset), local);
  }
  expect_equal(at::IntArrayRef(shard->local_strides), local.strides());
}

}  // namespace

TEST_CASE("a shard's places are those of its elements", "[dtensor]") {
  const auto ramp = [](int64_t a, int64_t b, int64_t c) { return at::arange(a * b * c).view({a, b, c}); };
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {3}, {2, 2}, {2, 3}}) {
    run_ranks(static_cast<int>(c10::multiply_integers(shape)), [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, shape);
      for (const auto& whole : {ramp(5, 7, 2), ramp(2, 1, 9), ramp(4, 5, 3), ramp(1, 1, 1)}) {
        for (const auto& first : kFirst) {
          for (const auto& second : {Placement(Shard(0)), Placement(Shard(2)), Placement(Replicate())}) {
            const auto x =
                distribute_tensor(whole, mesh, shape.size() == 1 ? Placements{first} : Placements{first, second});
            check_places(x, whole);
            check_places(x.transpose(0, 2), whole.transpose(0, 2));
          }
        }
      }
    });
  }
}

TEST_CASE("parts of sums, and memory with gaps, have no such places", "[dtensor]") {
  run_ranks(1, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {1});
    const auto placed = [&](at::IntArrayRef sizes, at::IntArrayRef strides, const Placement& placement) {
      TensorMeta meta = TensorMeta::contiguous(sizes, at::kFloat);
      meta.strides = DimVector(strides.begin(), strides.end());
      return shard_of_whole(*DTensorSpec::make(mesh, {placement}, meta), strides).has_value();
    };
    TESSERA_EXPECT(placed({3, 4}, {4, 1}, Shard(0)));
    TESSERA_EXPECT(placed({3, 4}, {1, 3}, Shard(0)));
    TESSERA_EXPECT(placed({3, 1}, {1, 99}, Replicate()));
    TESSERA_EXPECT(placed({0, 4}, {9, 9}, Shard(0)));
    TESSERA_EXPECT(!placed({3, 4}, {4, 1}, Partial()));
    TESSERA_EXPECT(!placed({3, 4}, {5, 1}, Shard(0)));
    TESSERA_EXPECT(!placed({3, 4}, {0, 1}, Shard(0)));
    TESSERA_EXPECT(!placed({3, 4}, {8, 2}, Shard(0)));
  });
}

}  // namespace tessera
