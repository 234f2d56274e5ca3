// An extension of the all-gather that sends int8 in place of float32.

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adam.h>

#include "dtensor/dtensor.h"
#include "testing/expect.h"
#include "testing/fsdp_models/patches.h"
#include "testing/run_ranks.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

/// int8 with one scale for each kBlock elements: the largest of them is 127. An element is at most half a step off, so
/// the error is at most the largest of its block / 254, beside the rounding of float32.
class Int8Extension : public AllGatherExtension {
 public:
  static constexpr int64_t kBlock = 32;

  int64_t encoded_bytes(int64_t numel) const override { return blocks(numel) * (kBlock + 4); }

  void pre_all_gather(const at::Tensor& shard, const at::Tensor& encoded) const override {
    const int64_t count = blocks(shard.numel());
    auto padded = at::zeros({count * kBlock}, shard.options().dtype(at::kFloat));
    padded.narrow(0, 0, shard.numel()).copy_(shard);
    const auto values = padded.view({count, kBlock});
    const auto scale = values.abs().amax({1}, /*keepdim=*/true) / 127;
    const auto steps = (values / scale.clamp_min(1e-30)).round().clamp(-127, 127);
    scales(encoded, count).copy_(scale);
    steps_of(encoded, count).copy_(steps);
  }

  void post_all_gather(const at::Tensor& encoded, const at::Tensor& decoded) const override {
    const int64_t count = blocks(decoded.numel());
    const auto values = steps_of(encoded, count).to(at::kFloat) * scales(encoded, count);
    decoded.copy_(values.view(-1).narrow(0, 0, decoded.numel()));
  }

 private:
  static int64_t blocks(int64_t numel) { return (numel + kBlock - 1) / kBlock; }
  static at::Tensor scales(const at::Tensor& encoded, int64_t count) {
    return encoded.narrow(0, 0, 4 * count).view(at::kFloat).view({count, 1});
  }
  static at::Tensor steps_of(const at::Tensor& encoded, int64_t count) {
    return encoded.narrow(0, 4 * count, kBlock * count).view(at::kChar).view({count, kBlock});
  }
};

std::shared_ptr<const AllGatherExtension> int8_for_matrices(const at::Tensor& param, const std::string&) {
  return param.dim() == 2 ? std::make_shared<Int8Extension>() : nullptr;
}

}  // namespace

TEST_CASE("an int8 all-gather: error bound, gradients of the decoded parameters, fewer bytes", "[extension]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto [dim, hidden] = GENERATE(std::pair<int64_t, int64_t>{48, 31}, std::pair<int64_t, int64_t>{3, 2});
  const auto reshard = world_size == 4 ? std::optional(ReshardAfterForward(2)) : std::nullopt;
  CAPTURE(world_size, dim, hidden);
  run_ranks(world_size, [&, dim = dim, hidden = hidden](int rank) {
    Tower reference(dim, hidden), tower(dim, hidden);
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    shard_tower(tower, {.reshard_after_forward = reshard, .all_gather_extension_fn = int8_for_matrices});
    int64_t sent = 0;
    const auto patch = patch_all_gather([&](const AllGatherFn& original, const at::Tensor& output,
                                            const at::Tensor& input, const ProcessGroupPtr& group) {
      sent += static_cast<int64_t>(input.nbytes());
      return original(output, input, group);
    });
    auto& block = tower->blocks[0];
    fsdp(block).unshard();
    TESSERA_EXPECT((sent > 0) == (world_size > 1));
    if (world_size == 2 && dim == 48) {
      const int64_t in_float = int64_t{4} * (2 * 24 * 31 + 48);
      TESSERA_EXPECT(sent > in_float / 4 && sent < in_float / 3);
    }
    {
      const at::NoGradGuard no_grad;
      const auto& weight = reference->blocks[0]->up->weight;
      const auto error = (block->up->weight - weight).abs().max().item<float>();
      const auto bound = weight.abs().max().item<float>() / 254;
      TESSERA_EXPECT(error <= bound * 1.0001f && (error > 0 || weight.numel() < 32));
      expect_bit_equal(block->up->bias.detach(), reference->blocks[0]->up->bias.detach());
    }
    fsdp(block).reshard();
    // The oracle computes with the decoded values.
    const auto from = tower->named_parameters();
    for (auto& unit : {&*tower->blocks[0], &*tower->blocks[1], &*tower->blocks[2]}) {
      fsdp(*unit).unshard();
    }
    fsdp(tower).unshard();
    {
      const at::NoGradGuard no_grad;
      for (auto& item : reference->named_parameters()) {
        item.value().copy_(from[item.key()]);
      }
    }
    for (auto& unit : {&*tower->blocks[0], &*tower->blocks[1], &*tower->blocks[2]}) {
      fsdp(*unit).reshard();
    }
    fsdp(tower).reshard();
    auto loss = loss_of(tower, rank);
    loss.backward();
    average_reference(*reference, world_size, [&](int r) { loss_of(reference, r).backward(); });
    expect_bit_equal(loss.detach(), loss_of(reference, rank).detach());
    for (const auto& item : reference->named_parameters()) {
      expect_bit_equal(full_tensor(from[item.key()].grad()), item.value().grad());
    }
  });
}

TEST_CASE("training with an int8 all-gather follows that without", "[extension]") {
  run_ranks(2, [](int rank) {
    Tower exact(32, 48), quantised(32, 48);
    fill_parameters(*exact, 1);
    fill_parameters(*quantised, 1);
    shard_tower(exact);
    shard_tower(quantised, {.all_gather_extension_fn = int8_for_matrices});
    torch::optim::Adam exact_optimizer(exact->parameters(), torch::optim::AdamOptions(1e-2));
    torch::optim::Adam optimizer(quantised->parameters(), torch::optim::AdamOptions(1e-2));
    float first = 0, last = 0, expected = 0;
    for (int step = 0; step < 20; ++step) {
      exact_optimizer.zero_grad();
      optimizer.zero_grad();
      auto exact_loss = loss_of(exact, rank), loss = loss_of(quantised, rank);
      exact_loss.backward();
      loss.backward();
      exact_optimizer.step();
      optimizer.step();
      first = step == 0 ? loss.item<float>() : first;
      last = loss.item<float>();
      expected = exact_loss.item<float>();
    }
    TESSERA_EXPECT(last < first - 0.5f * (first - expected) && std::abs(last - expected) < 0.1f * (first - expected));
  });
}

}  // namespace tessera::testing
