// replicate: equal to one process, in place, and together with fully_shard in one model.

#include "fully_shard/replicate.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "comm/context/comm_stats.h"
#include "debug/comm_debug_mode.h"
#include "dtensor/dtensor.h"
#include "nn/modules.h"
#include "nn/rms_norm.h"
#include "nn/transformer.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

void replicate_tower(Tower& tower, const ReplicateOptions& options = {}) {
  for (auto& block : tower->blocks) {
    replicate(block, options);
  }
  replicate(tower, options);
}

}  // namespace

TEST_CASE("replicate equals one process bit for bit over 10 Adam steps") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto built = GENERATE(OptimizerBuilt::BeforeSharding, OptimizerBuilt::AfterSharding);
  run_ranks(world_size, [&](int rank) {
    train_and_compare(
        rank, world_size, built, [](Tower& tower) { replicate_tower(tower); }, world_size);
  });
}

TEST_CASE("replicated and sharded units in one model equal one process bit for bit") {
  const bool root_is_sharded = GENERATE(true, false);
  run_ranks(3, [&](int rank) {
    const auto mixed = [&](Tower& tower) {
      replicate(tower->blocks[0]);
      fully_shard(tower->blocks[1]);
      replicate(tower->blocks[2]);
      root_is_sharded ? fully_shard(tower) : replicate(tower);
      expect_equal(placements(tower->blocks[0]->up->weight), Placements{Replicate()});
      expect_equal(placements(tower->blocks[1]->up->weight), Placements{Shard(0)});
    };
    train_and_compare(rank, 3, OptimizerBuilt::BeforeSharding, mixed, 3);
  });
}

TEST_CASE("replicated parameters are used where they are, and one all-reduce a unit is all that is sent") {
  run_ranks(2, [](int rank) {
    Tower tower;
    replicate_tower(tower, {.bucket_cap_mb = 0});
    const auto& weight = tower->blocks[0]->up->weight;
    const auto* memory = to_local(weight.detach()).const_data_ptr();
    const void* used = nullptr;
    hook_point(*tower->blocks[0], "test").register_forward_pre_hook([&](HookPoint&, TensorRefs) {
      used = weight.const_data_ptr();
    });
    reset_comm_stats();
    loss_of(tower, rank).backward();
    TESSERA_EXPECT(used == memory);
    expect_equal(comm_stats().calls(), 4);
    expect_equal(comm_stats()[Collective::AllReduce].calls, 4);
    expect_equal(fsdp(tower).memory_stats().held, 0u);
  });
}

TEST_CASE("the all-reduces of replicated units overlap with backward") {
  run_ranks(2, [](int rank) {
    Tower tower;
    replicate_tower(tower, {.bucket_cap_mb = 0});
    auto loss = loss_of(tower, rank);
    std::vector<std::string> events;
    fsdp(tower).set_event_observer([&](const FSDPEvent& event) { events.push_back(to_string(event)); });
    loss.backward();
    expect_equal(events,
                 std::vector<std::string>{"backward root", "backward block2", "reshard block2", "all_reduce block2",
                                          "backward block1", "reshard block1", "all_reduce block1", "backward block0",
                                          "reshard block0", "reduced block2", "all_reduce block0", "reshard root",
                                          "reduced block1", "all_reduce root", "reduced block0", "reduced root"});
  });
}

TEST_CASE("replicated units accumulate without communication, and with precision of their own") {
  run_ranks(2, [](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    replicate_tower(tower);
    fsdp(tower).set_requires_gradient_sync(false);
    reset_comm_stats();
    loss_of(tower, rank).backward();
    expect_equal(comm_stats().calls(), 0);
    fsdp(tower).set_requires_gradient_sync(true);
    loss_of(tower, rank + 10).backward();
    average_reference(*reference, 2, [&](int r) {
      loss_of(reference, r).backward();
      loss_of(reference, r + 10).backward();
    });
    check_sharded_parity(reference, tower, {.tolerance = {.rtol = 0, .atol = 0}});

    Block block(4, 4);
    replicate(block, {.mp_policy = {.param_dtype = at::kBFloat16}});
    const auto out = block(make_batch(1, 3, 4));
    TESSERA_EXPECT(out.scalar_type() == at::kBFloat16);
    out.sum().backward();
    TESSERA_EXPECT(block->up->weight.grad().scalar_type() == at::kFloat);
    expect_equal(fsdp(block).unsharded_bytes(), 0u);
  });
}

TEST_CASE("a replicated parameter that changed between forward and backward is an error") {
  run_ranks(2, [](int) {
    Block block(4, 4);
    replicate(block);
    auto loss = block(make_batch(1, 3, 4).requires_grad_()).sum();
    fsdp(block).reshard();
    {
      const at::NoGradGuard no_grad;
      block->up->weight.mul_(2);
    }
    expect_throws<StateError>([&] { loss.backward(); }, "changed in place between forward and backward");
  });
}

TEST_CASE("a unit has one API, and replicate one axis") {
  run_ranks(2, [](int) {
    Block block(4, 4);
    replicate(block);
    expect_throws<StateError>([&] { fully_shard(block); }, "is a unit already");
    Block other(4, 4);
    const auto mesh = init_device_mesh(at::kCPU, {2, 1}, {"replicate", "shard"});
    expect_throws<ValueError>([&] { replicate(other, {.mesh = mesh}); },
                              "replicate(tessera::testing::BlockImpl): the mesh");
  });
}

namespace {

/// In eval() a forward below replicate sends nothing, and the backward one all-reduce.
template <class Layer, class... Inputs>
void check_calls_in_eval(const char* name, Layer layer, const Inputs&... inputs) {
  replicate(layer);
  layer->eval();
  const auto sum = [&] {
    at::Tensor total = at::zeros({});
    auto result = layer(inputs...);
    visit_tensors(result, [&](at::Tensor& tensor) { total = total + tensor.sum(); });
    return total;
  };
  sum().backward();  // the first one of a unit sets it up
  const CommDebugMode mode;
  const at::Tensor loss = sum();
  const int64_t in_forward = mode.calls();
  loss.backward();
  if (in_forward != 0 || mode.calls() != 1 || mode.calls(Collective::AllReduce) != 1) {
    throw ExpectationError(
        fmt::format("{}: {} collectives in forward, and in all\n{}", name, in_forward, mode.to_string()));
  }
}

#define CHECK_CALLS(Name, arguments, ...) check_calls_in_eval(#Name, nn::Name arguments, __VA_ARGS__)
/// Of a layer without parameters, behind one that has some.
#define CHECK_CALLS_BEHIND(Name, arguments, ...)  \
  {                                               \
    nn::Sequential net;                           \
    net->push_back(nn::PReLU());                  \
    net->push_back(nn::Name arguments);           \
    check_calls_in_eval(#Name, net, __VA_ARGS__); \
  }

void check_layers_with_parameters() {
  const auto x = at::randn({2, 5, 8}), line = at::randn({2, 4, 9}), image = at::randn({2, 4, 6, 6}),
             cube = at::randn({1, 4, 5, 5, 5});
  CHECK_CALLS(Linear, (8, 7), x);
  CHECK_CALLS(Bilinear, (8, 8, 3), x, x);
  CHECK_CALLS(Embedding, (9, 4), at::ones({3, 5}, at::kLong));
  CHECK_CALLS(LayerNorm, (nn::LayerNormOptions({8})), x);
  CHECK_CALLS(RMSNorm, (nn::RMSNormOptions({8})), x);
  CHECK_CALLS(GroupNorm, (2, 4), image);
  CHECK_CALLS(BatchNorm1d, (4), line);
  CHECK_CALLS(BatchNorm2d, (4), image);
  CHECK_CALLS(BatchNorm3d, (4), cube);
  CHECK_CALLS(BatchNorm2d, (nn::BatchNormOptions(4).track_running_stats(false)), image);
  CHECK_CALLS(InstanceNorm2d, (nn::InstanceNormOptions(4).affine(true)), image);
  CHECK_CALLS(Conv1d, (4, 3, 3), line);
  CHECK_CALLS(Conv2d, (4, 3, 3), image);
  CHECK_CALLS(Conv3d, (4, 3, 3), cube);
  CHECK_CALLS(ConvTranspose1d, (4, 3, 3), line);
  CHECK_CALLS(ConvTranspose2d, (4, 3, 3), image);
  CHECK_CALLS(ConvTranspose3d, (4, 3, 3), cube);
  CHECK_CALLS(PReLU, (), x);
  CHECK_CALLS(RNN, (8, 4), x);
  CHECK_CALLS(GRU, (8, 4), x);
  CHECK_CALLS(LSTM, (8, 4), x);
  CHECK_CALLS(RNNCell, (8, 4), x[0]);
  CHECK_CALLS(GRUCell, (8, 4), x[0]);
  CHECK_CALLS(LSTMCell, (8, 4), x[0]);
  CHECK_CALLS(MultiheadAttention, (8, 2), x, x, x);
  CHECK_CALLS(TransformerEncoderLayer, (8, 2), x);
  CHECK_CALLS(TransformerDecoderLayer, (8, 2), x, x);
}

void check_layers_without_parameters() {
  const auto x = at::randn({3, 5, 8}), line = at::randn({2, 4, 8}), image = at::randn({2, 4, 6, 6}),
             cube = at::randn({1, 4, 5, 5, 5});
  CHECK_CALLS_BEHIND(ReLU, (), x);
  CHECK_CALLS_BEHIND(GELU, (), x);
  CHECK_CALLS_BEHIND(SiLU, (), x);
  CHECK_CALLS_BEHIND(GLU, (), x);
  CHECK_CALLS_BEHIND(RReLU, (), x);
  CHECK_CALLS_BEHIND(Softmax, (1), x);
  CHECK_CALLS_BEHIND(LogSoftmax, (1), x);
  CHECK_CALLS_BEHIND(Flatten, (), x);
  CHECK_CALLS_BEHIND(Identity, (), x);
  CHECK_CALLS_BEHIND(Dropout, (0.5), x);
  CHECK_CALLS_BEHIND(Dropout2d, (0.5), image);
  CHECK_CALLS_BEHIND(AlphaDropout, (0.5), x);
  CHECK_CALLS_BEHIND(FeatureAlphaDropout, (0.5), x);
  CHECK_CALLS_BEHIND(LocalResponseNorm, (2), image);
  CHECK_CALLS_BEHIND(InstanceNorm1d, (4), line);
  CHECK_CALLS_BEHIND(AvgPool2d, (2), image);
  CHECK_CALLS_BEHIND(MaxPool1d, (2), line);
  CHECK_CALLS_BEHIND(MaxPool2d, (2), image);
  CHECK_CALLS_BEHIND(MaxPool3d, (2), cube);
  CHECK_CALLS_BEHIND(AdaptiveAvgPool2d, (2), image);
  CHECK_CALLS_BEHIND(AdaptiveMaxPool2d, (2), image);
}

}  // namespace

TEST_CASE("in eval() no layer below replicate communicates beyond its unit") {
  run_ranks(2, [](int) {
    check_layers_with_parameters();
    check_layers_without_parameters();
  });
}

}  // namespace tessera::testing
