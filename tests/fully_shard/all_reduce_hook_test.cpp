// A reduction of one's own after the units', over an axis that their mesh does not have.

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include "comm/collectives.h"
#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// One path for all ranks, one for some, and one for none.
struct PathsImpl : torch::nn::Module {
  PathsImpl() {
    common = register_module("common", nn::Linear(5, 3));
    of_some = register_module("of_some", nn::Linear(5, 3));
    unused = register_module("unused", nn::Linear(5, 3));
  }
  at::Tensor forward(at::Tensor x) { return takes_both ? common(x) + of_some(x) : common(x); }

  nn::Linear common{nullptr}, of_some{nullptr}, unused{nullptr};
  bool takes_both = false;
};
TESSERA_MODULE(Paths);

at::Tensor loss_of(Paths& model, int rank, int first_ranks) {
  model->takes_both = rank < first_ranks;
  return weighted_loss(model(make_batch(static_cast<uint64_t>(rank), 3, 5)));
}

}  // namespace

TEST_CASE("with a hook, parameters that only some ranks beyond the mesh use have the same gradient on all", "[hook]") {
  // Of four ranks, those of the first outer one use a path, or the first of them alone.
  const int first_ranks = GENERATE(2, 1);
  run_ranks(4, [&](int rank) {
    Paths reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"outer", "dp"});
    fully_shard(sharded, {.mesh = mesh["dp"]});
    fsdp(sharded).set_all_reduce_hook(
        [&](const at::Tensor& flat) { all_reduce(flat, ReduceOp::Avg, mesh.group("outer")); });
    for (int step = 0; step < 2; ++step) {
      sharded->zero_grad();
      loss_of(sharded, rank, first_ranks).backward();
      average_reference(
          *reference, 4, [&](int r) { loss_of(reference, r, first_ranks).backward(); }, /*shard_ranks=*/2);
      for (const auto* layer : {&reference->unused->weight, &reference->unused->bias}) {
        layer->mutable_grad() = at::zeros_like(layer->detach());  // nobody knows that nobody used it
      }
      check_sharded_parity(reference, sharded, {.tolerance = {.rtol = 0, .atol = 0}});
    }
  });
}

}  // namespace tessera::testing
