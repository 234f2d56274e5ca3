// The stack of uneven Mlps, with and without sequence parallelism, against one process.

#include <ATen/TensorOperators.h>

#include "debug/comm_debug_mode.h"
#include "parallel/parallelize_module.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/parallel/tp_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

int64_t count_elements(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const auto& parameter : module.parameters()) {
    count += parameter.numel();
  }
  return count;
}

nn::Sequential filled_stack(int64_t dim, bool sequence_parallel) {
  auto stack = make_mlp_stack(dim, sequence_parallel);
  fill_in_double(*stack, 42);
  return stack;
}

}  // namespace

TEST_CASE("the stack has the parameters that it should", "[parallel]") {
  CHECK(count_elements(*make_mlp_stack(3)) == 219);
  CHECK(count_elements(*make_mlp_stack(16)) == 5328);
  CHECK(count_elements(*make_mlp_stack(17)) == 6001);
  CHECK(make_mlp_stack(3, true)->named_parameters().contains("3.weight"));
  CHECK(make_mlp_stack(3, true)->parameters().size() == 13);
}

TEST_CASE("the stack trains as on one process", "[parallel]") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      run_ranks(ranks, [&](int) {
        const auto mesh = init_device_mesh(at::kCPU, {ranks}, {"tp"});
        for (const int64_t dim : {3, 16, 17}) {
          auto reference = filled_stack(dim, sequence_parallel), sharded = filled_stack(dim, sequence_parallel);
          parallelize_module(sharded, mesh, mlp_stack_plan(sequence_parallel));
          expect_equal(to_string(placements(sharded->named_parameters()["1.in_proj.weight"])), "(Shard(0))");
          expect_equal(to_string(placements(sharded->named_parameters()["1.out_proj.weight"])), "(Shard(1))");
          expect_equal(to_string(placements(sharded->named_parameters()["1.out_proj.bias"])), "(Replicate())");
          train_and_compare({.reference = *reference,
                             .sharded = *sharded,
                             .run_reference = [&](const at::Tensor& x) { return reference(x); },
                             .run_sharded = [&](const at::Tensor& x) { return whole(sharded(x)); }},
                            make_input(7, {3, 5, dim}));
        }
      });
    }
  }
}

TEST_CASE("what the stack communicates", "[parallel]") {
  run_ranks(2, [](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    for (const bool sequence_parallel : {false, true}) {
      auto stack = filled_stack(6, sequence_parallel);
      parallelize_module(stack, mesh, mlp_stack_plan(sequence_parallel));
      at::Tensor out;
      {
        CommDebugMode mode(*stack);
        out = stack(make_input(7, {2, 4, 6}));
        expect_equal(mode.calls(Collective::AllReduce), sequence_parallel ? 2 : 3);
        expect_equal(mode.calls(Collective::ReduceScatter), sequence_parallel ? 1 : 0);
        // The sizes of the plain shards between the last MLP and the norm.
        expect_equal(mode.calls(Collective::AllGather), sequence_parallel ? 1 : 0);
        expect_equal(mode.calls(), sequence_parallel ? 4 : 3);
      }
      CommDebugMode mode;
      out.backward(out.detach());
      // The inputs' gradients of in_proj 1 and 2 (the first input needs none), and that of the norm's weight.
      expect_equal(mode.calls(Collective::AllReduce), sequence_parallel ? 3 : 2);
      expect_equal(mode.calls(Collective::AllGather), sequence_parallel ? 1 : 0);
      expect_equal(mode.calls(), sequence_parallel ? 4 : 2);
    }
  });
}

}  // namespace tessera::testing
