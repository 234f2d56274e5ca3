#include "parallel/experimental/context_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "base/error.h"
#include "debug/comm_debug_mode.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct AttentionCase {
  int64_t heads = 2, kv_heads = 2;
  int64_t length = 5, kv_length = 5;
  ContextAttentionOptions options = {};

  std::vector<at::Tensor> inputs() const {
    return {make_input(1, {3, heads, length, 4}).set_requires_grad(true),
            make_input(2, {3, kv_heads, kv_length, 4}).set_requires_grad(true),
            make_input(3, {3, kv_heads, kv_length, 6}).set_requires_grad(true)};
  }
};

void check_attention(const AttentionCase& test, const DeviceMesh& mesh, const Placements& query_placements,
                     const Placements& key_placements) {
  const auto expected_inputs = test.inputs();
  const auto expected =
      at::scaled_dot_product_attention(expected_inputs[0], expected_inputs[1], expected_inputs[2], {}, 0.0,
                                       test.options.is_causal, test.options.scale, test.options.enable_gqa);
  weighted_loss(expected).backward();
  std::vector<at::Tensor> inputs;
  for (const auto& input : expected_inputs) {
    const auto& placed = inputs.empty() ? query_placements : key_placements;
    inputs.push_back(distribute_tensor(input, mesh, placed));
  }
  const auto out = context_parallel_attention(inputs[0], inputs[1], inputs[2], test.options);
  expect_equal(to_string(placements(out)), to_string(query_placements));
  expect_close(full_tensor(out).detach(), expected.detach(), kDoubleTolerance);
  weighted_loss(full_tensor(out)).backward();
  for (size_t i = 0; i < inputs.size(); ++i) {
    expect_close(full_tensor(inputs[i].grad()), expected_inputs[i].grad(), kDoubleTolerance);
    if (key_placements == query_placements) {
      expect_equal(to_string(placements(inputs[i].grad())), to_string(placements(inputs[i])));
    }
  }
}

}  // namespace

TEST_CASE("attention over a cut sequence equals that of one process", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](int) {
      const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"cp"});
      for (const int64_t length : {1, 3, 8, 13}) {
        for (const bool causal : {false, true}) {
          check_attention({.length = length, .kv_length = length, .options = {.is_causal = causal}}, mesh, {Shard(2)},
                          {Shard(2)});
          check_attention({.heads = 6,
                           .length = length,
                           .kv_length = length,
                           .options = {.is_causal = causal, .scale = 0.3, .enable_gqa = true}},
                          mesh, {Shard(2)}, {Shard(2)});
          check_attention({.length = length, .kv_length = 7, .options = {.is_causal = causal}}, mesh, {Shard(2)},
                          {Replicate()});
        }
        check_attention({.length = length, .options = {.is_causal = true}}, mesh, {Replicate()}, {Shard(2)});
      }
    });
  }
}

TEST_CASE("attention with length, batch and heads cut by two axes", "[parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "cp"});
    for (const auto& placed : std::vector<Placements>{{Shard(0), Shard(2)},
                                                      {Shard(1), Shard(2)},
                                                      {Shard(2), Shard(1)},
                                                      {Shard(2), Shard(2)},
                                                      {Shard(2, 1), Shard(2)},
                                                      {Replicate(), Shard(2)}}) {
      check_attention({.options = {.is_causal = true}}, mesh, placed, placed);
      check_attention({.heads = 4, .options = {.is_causal = true, .enable_gqa = true}}, mesh, placed, placed);
    }
  });
}

TEST_CASE("context parallelism gathers keys and values, and scatters their gradients", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"cp"});
    std::vector<at::Tensor> inputs;
    for (const auto& input : AttentionCase().inputs()) {
      inputs.push_back(distribute_tensor(input, mesh, {Shard(2)}));
    }
    at::Tensor out;
    {
      CommDebugMode mode;
      out = context_parallel_attention(inputs[0], inputs[1], inputs[2]);
      expect_equal(mode.calls(Collective::AllGather), 2);
      expect_equal(mode.calls(), 2);
    }
    CommDebugMode mode;
    out.backward(out.detach());
    expect_equal(mode.calls(Collective::ReduceScatter), 2);
    expect_equal(mode.calls(), 2);
  });
}

TEST_CASE("what context_parallel_attention refuses", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"cp"});
    const auto tensor = [&](std::vector<int64_t> sizes, const Placement& placement) {
      return distribute_tensor(make_input(1, sizes), mesh, {placement});
    };
    const auto good = tensor({1, 2, 4, 4}, Shard(2));
    const auto flat = tensor({2, 4, 4}, Shard(1));
    expect_equal(error_text([&] { context_parallel_attention(good, flat, good); }),
                 std::string("context_parallel_attention: the key is Double[2, 4, 4] (Shard(1)) on DeviceMesh(cpu, "
                             "{cp: 2}); all three must be [batch, heads, length, head_dim] on one mesh"));
    expect_equal(error_text([&] {
                   context_parallel_attention(tensor({1, 2, 4, 4}, Shard(3)), good, good);
                 }),
                 std::string("context_parallel_attention: the query is Double[1, 2, 4, 4] (Shard(3)) on "
                             "DeviceMesh(cpu, {cp: 2}); batch, heads and length may be cut, head_dim may not"));
    const auto heads = tensor({1, 6, 4, 4}, Shard(1)), groups = tensor({1, 3, 4, 4}, Shard(1));
    expect_equal(error_text([&] { context_parallel_attention(heads, groups, groups, {.enable_gqa = true}); }),
                 std::string("context_parallel_attention: 6 query heads and 3 key heads cut over 2 ranks, which splits "
                             "a group; repeat keys and values for each query head, or replicate the heads"));
    // Also on the rank that has no query.
    const auto one_query = tensor({1, 4, 1, 4}, Shard(2));
    expect_equal(error_text([&] { context_parallel_attention(one_query, good, good); }),
                 std::string("context_parallel_attention: query [1, 4, 1, 4], key [1, 2, 4, 4] and value [1, 2, 4, 4] "
                             "do not fit. All have as many batch items and heads (with enable_gqa, the query a "
                             "multiple of the others' heads), key and value one length, query and key one head_dim"));
    expect_throws<ValueError>(
        [&] {
          context_parallel_attention(good, tensor({1, 2, 5, 4}, Shard(2)), good);
        },
        "key and value one length");
    expect_throws<ValueError>(
        [&] {
          context_parallel_attention(make_input(1, {1, 2, 4, 4}), good, good);
        },
        "is not a DTensor");
  });
}

TEST_CASE("heads cut by two axes, not into whole groups", "[parallel]") {
  run_ranks(4, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "cp"});
    const auto cut = [&](int64_t heads) {
      return distribute_tensor(make_input(1, {1, heads, 3, 4}), mesh, {Shard(1), Shard(1)});
    };
    expect_throws<NotImplementedError>(
        [&] { context_parallel_attention(cut(4), cut(2), cut(2), {.enable_gqa = true}); },
        "4 query heads and 2 key heads cut over 4 ranks, which splits a group");
    check_attention({.heads = 8, .kv_heads = 4, .options = {.enable_gqa = true}}, mesh, {Shard(1), Shard(1)},
                    {Shard(1), Shard(1)});
  });
}

}  // namespace tessera::testing
