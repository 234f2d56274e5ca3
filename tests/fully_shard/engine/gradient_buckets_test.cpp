// Which gradients of replicated units share an all-reduce, and when it starts.

#include <ATen/TensorOperators.h>

#include "comm/context/comm_stats.h"
#include "dtensor/dtensor.h"
#include "fully_shard/reduce/unit_gradients.h"
#include "fully_shard/replicate.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr double kBytes = 1.0 / (1024 * 1024);  // in MiB

// A block of a Tower reduces 1984 bytes, each parameter and the flags padded to 8 elements; two of them:
constexpr double kTwoBlocks = 3968 * kBytes;
// Of a Tower that is one unit: out, norm and most of block2; the rest of block2 and most of block1; the rest of that
// and most of block0; the rest.
constexpr double kFourParts = 2000 * kBytes;

void replicate_units(Tower& tower, double cap) {
  for (auto& block : tower->blocks) {
    replicate(block, {.bucket_cap_mb = cap});
  }
  replicate(tower, {.bucket_cap_mb = cap});
}

void replicate_whole(Tower& tower, double cap) {
  replicate(tower, {.bucket_cap_mb = cap});
}

int64_t all_reduces() {
  return comm_stats()[Collective::AllReduce].calls;
}

/// `first` always; `second` only if asked.
struct ChoosyImpl : torch::nn::Module {
  ChoosyImpl() {
    first = register_module("first", nn::Linear(5, 5));
    second = register_module("second", nn::Linear(5, 5));
  }
  at::Tensor forward(at::Tensor x, bool uses_second) {
    x = first(x);
    return uses_second ? second(x) : x;
  }
  nn::Linear first{nullptr}, second{nullptr};
};
TESSERA_MODULE(Choosy);

}  // namespace

TEST_CASE("parts are cut from the last parameter on, the first one small", "[buckets]") {
  constexpr int64_t kMb = kFirstBucketBytes;
  CHECK(cut_by_bytes({3 * kMb, 3 * kMb, kMb, 5 * kMb}, 6 * kMb) == std::vector<size_t>{1, 2, 1});
  CHECK(cut_by_bytes({1, 1, kMb - 1, 1}, 25 * kMb) == std::vector<size_t>{2, 2});
  CHECK(cut_by_bytes({10, 30, 10, 10}, 20) == std::vector<size_t>{2, 1, 1});
  CHECK(cut_by_bytes({7}, 1) == std::vector<size_t>{1});
}

TEST_CASE("training does not depend on which gradients share an all-reduce", "[buckets]") {
  const int world_size = GENERATE(2, 3);
  const auto shard = GENERATE(replicate_units, replicate_whole);
  const double cap = GENERATE(0.0, kTwoBlocks, kFourParts, 25.0);
  CAPTURE(world_size, shard == replicate_whole, cap);
  run_ranks(world_size, [&](int rank) {
    train_and_compare(
        rank, world_size, OptimizerBuilt::BeforeSharding, [&](Tower& tower) { shard(tower, cap); }, world_size);
  });
}

TEST_CASE("units share an all-reduce up to the cap, while backward goes on", "[buckets]") {
  run_ranks(2, [](int rank) {
    Tower tower;
    replicate_units(tower, kTwoBlocks);
    auto loss = loss_of(tower, rank);
    std::vector<std::string> events;
    fsdp(tower).set_event_observer([&](const FSDPEvent& event) { events.push_back(to_string(event)); });
    reset_comm_stats();
    loss.backward();
    expect_equal(events,
                 std::vector<std::string>{"backward root", "backward block2", "reshard block2", "backward block1",
                                          "reshard block1", "all_reduce block2", "all_reduce block1", "backward block0",
                                          "reshard block0", "reshard root", "all_reduce block0", "all_reduce root",
                                          "reduced block2", "reduced block1", "reduced block0", "reduced root"});
    expect_equal(all_reduces(), 2);
  });
}

TEST_CASE("a model that is one unit is reduced in parts, each as soon as its gradients are there", "[buckets]") {
  run_ranks(2, [](int rank) {
    Tower tower;
    replicate_whole(tower, kFourParts);
    std::vector<std::string> events;
    for (const size_t i : {0, 1}) {
      hook_point(*tower->blocks[i], "test").register_forward_hook([&events, i](HookPoint&, TensorRefs outputs) {
        outputs[0]->register_hook([&events, i](const at::Tensor& grad) {
          events.push_back(fmt::format("block{} begins", i));
          return grad;
        });
      });
    }
    auto loss = loss_of(tower, rank);
    fsdp(tower).set_event_observer([&](const FSDPEvent& event) { events.push_back(to_string(event)); });
    reset_comm_stats();
    loss.backward();
    expect_equal(events,
                 std::vector<std::string>{"backward root", "all_reduce root", "block1 begins", "all_reduce root",
                                          "block0 begins", "reduced root", "all_reduce root", "reduced root",
                                          "all_reduce root", "reshard root", "reduced root", "reduced root"});
    expect_equal(all_reduces(), 4);
  });
}

TEST_CASE("the first all-reduce has 1 MiB at most, and only what can be added up together shares one", "[buckets]") {
  run_ranks(2, [](int rank) {
    Tower large(400, 200);  // blocks of 0.6 MiB
    replicate_units(large, 25);
    auto loss = loss_of(large, rank);
    reset_comm_stats();
    loss.backward();
    expect_equal(all_reduces(), 2);

    Tower mixed;
    replicate(mixed->blocks[2]);
    replicate(mixed->blocks[1], {.mp_policy = {.reduce_dtype = at::kDouble}});
    replicate(mixed->blocks[0]);
    replicate(mixed);
    loss = loss_of(mixed, rank);
    reset_comm_stats();
    loss.backward();
    expect_equal(all_reduces(), 3);
  });
}

TEST_CASE("gradients in buckets and parts add up over backwards, with and without sync", "[buckets]") {
  const auto shard = GENERATE(replicate_units, replicate_whole);
  const double cap = GENERATE(kTwoBlocks, kFourParts);
  run_ranks(2, [&](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    shard(tower, cap);
    reset_comm_stats();
    fsdp(tower).set_requires_gradient_sync(false);
    loss_of(tower, rank).backward();
    expect_equal(comm_stats().calls(), 0);
    fsdp(tower).set_requires_gradient_sync(true);
    fsdp(tower).set_is_last_backward(false);
    loss_of(tower, rank + 10).backward();
    fsdp(tower).set_is_last_backward(true);
    loss_of(tower, rank + 20).backward();
    std::vector<at::Tensor> sums;
    average_reference(*reference, 2, [&](int r) {
      loss_of(reference, r).backward();
      loss_of(reference, r + 10).backward();
    });
    for (const auto& param : reference->parameters()) {
      sums.push_back(param.grad());
    }
    average_reference(*reference, 2, [&](int r) { loss_of(reference, r + 20).backward(); });
    size_t i = 0;
    for (const auto& param : reference->parameters()) {
      param.mutable_grad() = sums[i++] + param.grad();
    }
    check_sharded_parity(reference, tower, {.tolerance = {.rtol = 0, .atol = 0}});
  });
}

TEST_CASE("parts with parameters that only some ranks use, that none uses, and that are frozen", "[buckets]") {
  const int user = GENERATE(0, 1, 2);  // 2: no rank uses `second`
  const bool is_frozen = GENERATE(false, true);
  const bool cuts = GENERATE(false, true);  // fully_shard, which has one reduction for all
  // Float buffers on the CPU take another way than those of other dtypes and devices.
  const auto reduce_dtype = GENERATE(at::kFloat, at::kDouble);
  run_ranks(2, [&](int rank) {
    Choosy reference, model;
    for (auto* choosy : {&reference, &model}) {
      fill_parameters(**choosy, 1);
      (*choosy)->second->weight.set_requires_grad(!is_frozen);
    }
    if (cuts) {
      fully_shard(model, {.mp_policy = {.reduce_dtype = reduce_dtype}});
    } else {  // each parameter is a part
      replicate(model, {.mp_policy = {.reduce_dtype = reduce_dtype}, .bucket_cap_mb = 20 * kBytes});
    }
    const auto loss = [&](Choosy& choosy, int r) {
      return weighted_loss(choosy(make_batch(static_cast<uint64_t>(r), 3, 5), r == user));
    };
    for (int step = 0; step < 2; ++step) {
      reset_comm_stats();
      model->zero_grad();
      loss(model, rank).backward();
      expect_equal(all_reduces(), cuts ? 0 : is_frozen ? 3 : 4);
      average_reference(*reference, 2, [&](int r) { loss(reference, r).backward(); });
      check_sharded_parity(reference, model, {.tolerance = {.rtol = 0, .atol = 0}});
    }
  });
}

TEST_CASE("a gradient that comes when its part is under way is an error; afterwards training goes on", "[buckets]") {
  run_ranks(2, [](int rank) {
    Tower reference, tower;
    fill_parameters(*reference, 1);
    fill_parameters(*tower, 1);
    replicate_whole(tower, kFourParts);
    auto handle = hook_point(*tower->blocks[1], "test").register_forward_hook([&](HookPoint&, TensorRefs outputs) {
      outputs[0]->register_hook([&](const at::Tensor& grad) {
        const at::AutoGradMode with_gradients(true);
        weighted_loss(tower->out->weight).backward();
        return grad;
      });
    });
    auto loss = loss_of(tower, rank);
    expect_throws<StateError>([&] { loss.backward(); }, "'out.weight' of tessera::testing::TowerImpl got a second");
    handle.remove();
    fsdp(tower).reset_iter_state();
    tower->zero_grad();
    loss_of(tower, rank).backward();
    average_reference(*reference, 2, [&](int r) { loss_of(reference, r).backward(); });
    check_sharded_parity(reference, tower, {.tolerance = {.rtol = 0, .atol = 0}});
  });
}

TEST_CASE("caps that are none, and that differ between ranks, are refused", "[buckets]") {
  run_ranks(2, [](int rank) {
    testing::Block block(4, 4);
    expect_throws<ValueError>([&] { replicate(block, {.bucket_cap_mb = -1}); }, "bucket_cap_mb = -1; it is from 0");
    expect_throws<ValueError>([&] { replicate(block, {.bucket_cap_mb = 1.0 + rank}); }, "bucket_cap_mb 2");
    replicate(block);
  });
}

}  // namespace tessera::testing
