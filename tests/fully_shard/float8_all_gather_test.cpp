#include "fully_shard/layout/float8_all_gather.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adam.h>

#include <cmath>
#include <limits>

#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"
#include "testing/expect.h"
#include "testing/fsdp_models/patches.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// What the other ranks see of `shard`.
at::Tensor through_float8(const at::Tensor& shard) {
  const auto extension = float8_all_gather();
  const at::Tensor flat = shard.reshape(-1);
  const at::Tensor encoded = at::empty({extension->encoded_bytes(flat.numel())}, flat.options().dtype(at::kByte));
  const at::Tensor decoded = at::empty_like(flat);
  extension->pre_all_gather(flat, encoded);
  extension->post_all_gather(encoded, decoded);
  return decoded.view(shard.sizes());
}

std::shared_ptr<const AllGatherExtension> float8_for_matrices(const at::Tensor& param, const std::string&) {
  return param.dim() == 2 ? float8_all_gather() : nullptr;
}

}  // namespace

TEST_CASE("float8: elements are off by a sixteenth of themselves at most, whatever their size", "[extension]") {
  for (const c10::Device device : test_devices()) {
    for (const double size : {1.0, 1e-20, 1e20}) {
      CAPTURE(device, size);
      const at::Tensor values = (at::randn({1000}, make_generator(1)) * size).to(device);
      const at::Tensor largest = values.abs().max();
      const at::Tensor error = (through_float8(values) - values).abs();
      CHECK((error <= values.abs() / 16 + largest / 448 / 1024).all().item<bool>());
      CHECK((error > 0).any().item<bool>());
    }
    CHECK(through_float8(at::zeros({5}, device)).equal(at::zeros({5}, device)));
    CHECK(through_float8(at::tensor({448.f, -1.f, 0.5f}).to(device)).cpu().equal(at::tensor({448.f, -1.f, 0.5f})));
    CHECK(through_float8(at::full({3}, 1e-38f, device)).abs().max().item<float>() <= 1e-38f);
    for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      CHECK(through_float8(at::full({3}, bad, device)).isnan().all().item<bool>());
    }
  }
}

TEST_CASE("float8: a model computes with the values that its ranks' rows have, and sends a byte each", "[extension]") {
  const int world_size = GENERATE(2, 3, 4);
  const auto dtype = GENERATE(at::kFloat, at::kBFloat16);
  for (const c10::Device device : test_devices()) {
    CAPTURE(world_size, dtype, device);
    run_ranks(world_size, [&](int rank) {
      const OwnStream stream(device);
      Block reference(48, 31), block(48, 31);
      for (auto* each : {&reference, &block}) {
        fill_parameters(**each, 1);
        (*each)->to(device);
      }
      fully_shard(block, {.mesh = init_device_mesh(device.type(), {world_size}),
                          .mp_policy = {.param_dtype = dtype, .reduce_dtype = at::kFloat},
                          .all_gather_extension_fn = float8_for_matrices});
      {
        const at::NoGradGuard no_grad;
        for (auto& param : reference->parameters()) {
          if (param.dim() == 2) {
            for (const auto& rows : param.chunk(world_size)) {
              rows.copy_(through_float8(rows).to(dtype));
            }
          }
        }
        reference->to(dtype);
      }
      int64_t sent = 0;
      const auto patch = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
                                              const at::Tensor& input, const ProcessGroupPtr& group) {
        sent = static_cast<int64_t>(input.nbytes());
        return original(output, input, group);
      });
      const auto input = make_batch(static_cast<uint64_t>(rank), 3, 48).to(device, dtype);
      expect_bit_equal(block(input).detach(), reference(input).detach());
      const auto elements = 2 * 48 * 31 / world_size;
      TESSERA_EXPECT(sent > elements && sent < elements + 600);
    });
  }
}

TEST_CASE("float8: training follows that with exact all-gathers", "[extension]") {
  for (const c10::Device device : test_devices()) {
    CAPTURE(device);
    run_ranks(2, [&](int rank) {
      const OwnStream stream(device);
      const auto mesh = init_device_mesh(device.type(), {2});
      Tower exact(32, 48), small(32, 48);
      for (auto* tower : {&exact, &small}) {
        fill_parameters(**tower, 1);
        (*tower)->to(device);
      }
      shard_tower(exact, {.mesh = mesh});
      shard_tower(small, {.mesh = mesh, .all_gather_extension_fn = float8_for_matrices});
      const auto target = make_batch(100, 8, 3).to(device);
      const auto train = [&](Tower& tower) {
        torch::optim::Adam optimizer(tower->parameters(), torch::optim::AdamOptions(1e-2));
        std::vector<double> losses;
        for (int step = 0; step < 30; ++step) {
          optimizer.zero_grad();
          const auto loss = (tower(make_batch(static_cast<uint64_t>(rank), 8, 5).to(device)) - target).square().mean();
          loss.backward();
          optimizer.step();
          losses.push_back(loss.item<double>());
        }
        return losses;
      };
      const auto expected = train(exact), actual = train(small);
      TESSERA_EXPECT(expected.back() < 0.5 * expected.front());
      TESSERA_EXPECT(std::abs(actual.back() - expected.back()) < 0.1 * expected.front());
    });
  }
}

}  // namespace tessera::testing
