#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "comm/context/comm_stats.h"
#include "dtensor/dispatch/dispatch_scopes.h"
#include "dtensor/dtensor.h"
#include "dtensor/ops/matmul/sharded_attention.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "testing/test_devices.h"
#include "tests/dtensor/op_oracle.h"
#include "third_party/catch2/catch.h"

namespace tessera {

TEST_CASE("attention", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      {.name = "attention",
       .inputs = {{{3, 2, 5, 4}}, {{3, 2, 5, 4}}, {{3, 2, 5, 4}}},
       .call = [](const Tensors& x) -> Tensors { return {at::scaled_dot_product_attention(x[0], x[1], x[2])}; }},
      {.name = "causal attention",
       .inputs = {{{1, 3, 4, 2}}, {{1, 3, 4, 2}}, {{1, 3, 4, 2}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], {}, 0.0, true)};
       }},
      {.name = "masked attention",
       .inputs = {{{2, 3, 4, 2}}, {{2, 3, 5, 2}}, {{2, 3, 5, 2}}, {{4, 5}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], x[3].detach())};
       }},
      {.name = "attention with a mask per item",
       .inputs = {{{2, 3, 4, 2}}, {{2, 3, 5, 2}}, {{2, 3, 5, 2}}, {{2, 1, 4, 5}}},
       .call = [](const Tensors& x) -> Tensors {
         return {at::scaled_dot_product_attention(x[0], x[1], x[2], x[3].detach(), 0.0, false, 0.3)};
       }},
  }));
}

TEST_CASE("attention's output lies as on one device", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto attend = [](const at::Tensor& items, bool heads_inside_length) {
      const auto query = heads_inside_length ? items.transpose(1, 2) : items;
      return at::scaled_dot_product_attention(query, query, query);
    };
    const auto items = at::ones({2, 3, 4, 5});
    for (const bool heads_inside_length : {false, true}) {
      const auto expected = attend(items, heads_inside_length);
      const auto actual = attend(distribute_tensor(items, mesh, {Shard(0)}), heads_inside_length);
      expect_equal(actual.strides(), expected.strides());
      expect_equal(to_local(actual).strides(), expected.strides());
    }
  });
}

/// What CUDA takes, on every device: on plain tensors ATen's.
OpCase sharded_attention_case(std::string name, std::vector<Input> inputs, AttentionOptions options) {
  return {.name = std::move(name), .inputs = std::move(inputs), .call = [options](const Tensors& x) -> Tensors {
            const std::optional<at::Tensor> mask = x.size() > 3 ? std::optional(x[3]) : std::nullopt;
            if (is_dtensor(x[0])) {
              return {sharded_attention(x[0], x[1], x[2], mask, options)};
            }
            return {at::scaled_dot_product_attention(x[0], x[1], x[2], mask, 0.0, options.is_causal, options.scale,
                                                     options.enable_gqa)};
          }};
}

TEST_CASE("attention on this rank's items, as on CUDA", "[dtensor][ops]") {
  CHECK_NOTHROW(check_ops({
      sharded_attention_case("items and heads", {{{3, 2, 5, 4}}, {{3, 2, 5, 4}}, {{3, 2, 5, 4}}}, {}),
      sharded_attention_case("causal", {{{1, 3, 4, 2}}, {{1, 3, 4, 2}}, {{1, 3, 4, 2}}}, {.is_causal = true}),
      sharded_attention_case("a mask for all, and its gradient",
                             {{{2, 3, 4, 2}}, {{2, 3, 5, 2}}, {{2, 3, 5, 2}}, {{4, 5}}}, {.scale = 0.3}),
      sharded_attention_case("a mask per item", {{{2, 3, 4, 2}}, {{2, 3, 5, 2}}, {{2, 3, 5, 2}}, {{2, 1, 4, 5}}}, {}),
      sharded_attention_case("values of another width", {{{2, 2, 3, 4}}, {{2, 2, 5, 4}}, {{2, 2, 5, 3}}}, {}),
      sharded_attention_case("fewer heads of keys", {{{2, 4, 3, 2}}, {{2, 2, 3, 2}}, {{2, 2, 3, 2}}},
                             {.enable_gqa = true}),
  }));
}

TEST_CASE("attention on this rank's items moves nothing that is cut alike, and says what it may not move",
          "[dtensor]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto q = distribute_tensor(at::ones({2, 4, 3, 2}), mesh, {Shard(1)});
    const auto k = distribute_tensor(at::ones({2, 4, 3, 2}), mesh, {Shard(2)});
    expect_equal(can_shard_attention(q, q, q, at::ones({3, 3})), false);
    expect_equal(can_shard_attention(q[0], q[0], q[0], std::nullopt), false);
    reset_comm_stats();
    const auto y = sharded_attention(q, q, q, std::nullopt, {});
    expect_equal(to_string(placements(y)), "(Shard(1))");
    expect_equal(to_string(placements(y.transpose(1, 2).view({2, 3, 8}))), "(Shard(2))");
    expect_equal(comm_stats().calls(), 0);
    const ExplicitRedistribution scope;
    expect_throws<StateError>([&] { sharded_attention(q, k, q, std::nullopt, {}); },
                              "would redistribute its key, Float[2, 4, 3, 2] (Shard(2))");
  });
}

/// Outputs and gradients of causal attention.
Tensors attention_and_gradients(const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) {
    leaves.push_back(input.detach().requires_grad_());
  }
  const auto output = at::scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], {}, 0.0, /*is_causal=*/true);
  (output * output.detach()).sum().backward();
  return {output.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

// In the dtypes for which devices have fused kernels: the oracle's float64 has none on a GPU.
TEST_CASE("attention by the device's fused kernels", "[dtensor][ops]") {
  const auto [dtype, tolerance] =
      GENERATE(std::pair{at::kFloat, Tolerance{1e-4, 1e-4}}, std::pair{at::kBFloat16, Tolerance{4e-2, 4e-2}});
  for (const c10::Device device : test_devices()) {
    Tensors whole;
    for (uint64_t seed = 0; seed < 3; ++seed) {
      whole.push_back(at::randn({3, 4, 40, 16}, make_generator(seed)).to(device, dtype));
    }
    const auto expected = attention_and_gradients(whole);
    run_ranks(2, [&](int) {
      const auto mesh = init_device_mesh(device.type(), {2});
      for (const Placement& placement : Placements{Shard(0), Shard(1), Shard(2), Replicate()}) {
        Tensors placed;
        for (const auto& input : whole) {
          placed.push_back(distribute_tensor(input, mesh, {placement}));
        }
        const auto actual = attention_and_gradients(placed);
        for (size_t i = 0; i < actual.size(); ++i) {
          expect_close(full_tensor(actual[i]), expected[i], tolerance);
        }
      }
    });
  }
}

TEST_CASE("attention over cut heads moves nothing", "[dtensor][ops]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2});
    const auto q = distribute_tensor(at::ones({1, 4, 3, 2}), mesh, {Shard(1)});
    reset_comm_stats();
    const auto y = at::scaled_dot_product_attention(q, q, q);
    expect_equal(to_string(placements(y)), "(Shard(1))");
    expect_equal(to_string(placements(y.transpose(1, 2).reshape({1, 3, 8}))), "(Shard(2))");
    expect_equal(comm_stats().calls(), 0);
  });
}

}  // namespace tessera
