// Reads of full parameters once their unit is resharded.

#include <ATen/TensorOperators.h>
#include <torch/version.h>

#include "fully_shard/fully_shard.h"
#include "fully_shard/memory/block_pool.h"
#include "nn/sequential.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {
namespace {

/// An op of a term that it keeps saves a view of a parameter.
struct KeepingImpl : torch::nn::Module {
  KeepingImpl() {
    inner = register_module("inner", tessera::nn::Linear(4, 4));
    scale = register_parameter("scale", at::ones({4}));
  }
  at::Tensor forward(at::Tensor x) {
    const auto hidden = inner(x).tanh();
    penalty = (hidden * scale.view({1, 4})).sum();
    return hidden;
  }
  tessera::nn::Linear inner{nullptr};
  at::Tensor scale, penalty;
};
TESSERA_MODULE(Keeping);

}  // namespace

TEST_CASE("freed memory of full parameters is not read", "[freed_params]") {
  if (!ReadGuard::is_effective()) {
    WARN("skipped: libtorch " TORCH_VERSION " cannot forbid it");
    return;
  }
  constexpr const char* kFreed = "was resharded, which freed its memory";
  run_ranks(2, [&](int rank) {
    Keeping first, second;
    tessera::nn::Sequential net(first, second, tessera::nn::Linear(4, 2));
    fully_shard(first);
    fully_shard(second);
    fully_shard(net);
    for (int step = 0; step < 2; ++step) {
      const auto loss = net(make_batch(static_cast<uint64_t>(rank), 3, 4)).sum();
      expect_throws<c10::Error>([&] { first->penalty.backward(); }, kFreed);
      fsdp(net).reset_iter_state();
      net->zero_grad();
    }
    auto handle = fsdp(first);
    handle.unshard();
    const auto copy = first->scale.detach(), view = first->scale.view({2, 2});
    TESSERA_EXPECT(copy.sum().item<float>() == 4.F);
    handle.reshard();
    expect_throws<c10::Error>([&] { copy.norm(); }, "the full parameter 'scale' was read after its unit");
    expect_throws<c10::Error>([&] { view + 1; }, kFreed);
    expect_throws<c10::Error>([&] { copy.clone(); }, kFreed);
    handle.unshard();
    TESSERA_EXPECT(copy.sum().item<float>() == 4.F);
    handle.reshard();
    net(make_batch(static_cast<uint64_t>(rank), 3, 4)).sum().backward();
  });
}

}  // namespace tessera::testing
