// Units in regions that are computed again in backward, by a backward that is nested in the outer one.

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "comm/context/comm_stats.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// Keeps the input only, and computes the region again in backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Block* block) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<int64_t>(block);
    return Block(*block)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode enable(true);
    const auto* block = reinterpret_cast<const Block*>(context->saved_data["block"].toInt());
    torch::autograd::backward({Block(*block)(x)}, {grads[0]});
    return {x.grad(), {}};
  }
};

/// Linear, blocks that are computed again where `checkpointed`, Linear.
struct CheckpointedImpl : torch::nn::Module {
  CheckpointedImpl() {
    in = register_module("in", tessera::nn::Linear(5, 17));
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block(17, 13)));
    }
    out = register_module("out", tessera::nn::Linear(17, 3));
  }
  at::Tensor forward(at::Tensor x) {
    x = in(x);
    for (const auto& block : blocks) {
      x = checkpointed ? Checkpoint::apply(x, &block) : Block(block)(x);
    }
    return out(x);
  }

  tessera::nn::Linear in{nullptr}, out{nullptr};
  std::vector<Block> blocks;
  bool checkpointed = false;
};
TESSERA_MODULE(Checkpointed);

}  // namespace

TEST_CASE("units inside of checkpointed regions equal one process bit for bit, and the outer unit stays gathered") {
  const int world_size = GENERATE(1, 2, 3);
  const bool reshard_root = GENERATE(true, false);
  run_ranks(world_size, [&](int rank) {
    Checkpointed reference, model;
    fill_parameters(*reference, 1);
    fill_parameters(*model, 1);
    model->checkpointed = true;
    for (auto& block : model->blocks) {
      fully_shard(block);
    }
    fully_shard(model, {.reshard_after_forward = reshard_root});
    const auto loss_of = [](Checkpointed& tower, int r) {
      return weighted_loss(tower(make_batch(static_cast<uint64_t>(r), 3, 5)));
    };
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      reset_comm_stats();
      loss_of(model, rank).backward();
      expect_equal(comm_stats()[Collective::ReduceScatter].calls, world_size > 1 ? 4 : 0);
      expect_equal(comm_stats()[Collective::AllGather].calls, world_size > 1 ? 7 + reshard_root : 0);
      average_reference(*reference, world_size, [&](int r) { loss_of(reference, r).backward(); });
      check_sharded_parity(reference, model, {.tolerance = {.rtol = 0, .atol = 0}});
      expect_equal(fsdp(model).unsharded_bytes(), 0u);
    }
  });
}

}  // namespace tessera::testing
