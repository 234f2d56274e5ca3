// The same oracle with ranks that are processes: reductions run in the order of the ranks there too.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "comm/collectives.h"
#include "comm/shm/shared_gradients.h"
#include "comm/shm/shared_memory.h"
#include "dtensor/dtensor.h"
#include "nn/conv.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_processes.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/lora_models.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/train_and_compare.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

TEST_CASE("fully_shard over gloo equals one process bit for bit, 2 processes") {
  run_processes(2, [](int rank) { train_and_compare(rank, 2, OptimizerBuilt::BeforeSharding, {}); });
}

TEST_CASE("fully_shard over gloo equals one process bit for bit, 3 processes") {
  run_processes(3, [](int rank) { train_and_compare(rank, 3, OptimizerBuilt::AfterSharding, {}); });
}

TEST_CASE("fully_shard over shm equals one process bit for bit, 3 processes") {
  run_processes(3, [](int rank) { train_and_compare(rank, 3, OptimizerBuilt::BeforeSharding, {}); },
                {.backend = "shm"});
}

TEST_CASE("fully_shard over shm: shards that the other ranks read where they lie, 2 to 4 processes") {
  for (const int world_size : {2, 3, 4}) {
    const auto body = [&](int rank) {
      // 1.3 MB a block.
      const TrainOn where{.rank = rank, .world_size = world_size, .shard_ranks = world_size, .dim = 401, .hidden = 399};
      train_and_compare(where, OptimizerBuilt::BeforeSharding, [](Tower& tower) { shard_tower(tower); });
      TESSERA_EXPECT(mapped_peer_bytes() > (world_size - 1) * 3 * 1'250'000 / world_size);
    };
    run_processes(world_size, body, {.backend = "shm"});
  }
}

TEST_CASE("fully_shard over shm: gradients are the program's own memory, unless it enables shared gradients") {
  const auto body = [](int rank) {
    const auto* const allocator = c10::GetAllocator(c10::kCPU);
    Tower tower(401, 399);
    shard_tower(tower);
    bool is_shared = false;
    tower->blocks[1]->up->weight.register_hook(
        [&](const at::Tensor& grad) { is_shared = is_shared || shared_place(grad).has_value(); });
    tower(make_batch(static_cast<uint64_t>(rank), 3, 5)).sum().backward();
    TESSERA_EXPECT(!is_shared);
    TESSERA_EXPECT(c10::GetAllocator(c10::kCPU) == allocator);
  };
  run_processes(2, body, {.backend = "shm"});
}

TEST_CASE("fully_shard over shm: large gradients lie where the other ranks read them, small ones and others' do not") {
  const auto body = [](int rank) {
    enable_shared_gradients();
    Tower tower(401, 399);
    shard_tower(tower);
    std::vector<bool> weights_are_shared, others_are_shared;
    const auto& parameters = tower->blocks[1]->named_parameters();
    for (const auto& parameter : parameters) {
      auto& seen = parameter.key().ends_with("weight") ? weights_are_shared : others_are_shared;
      parameter.value().register_hook(
          [&seen](const at::Tensor& grad) { seen.push_back(shared_place(grad).has_value()); });
    }
    const auto x = make_batch(static_cast<uint64_t>(rank), 3, 5);
    for (int step = 0; step < 2; ++step) {
      tower(x).sum().backward();
    }
    TESSERA_EXPECT(weights_are_shared == std::vector<bool>(4, true));
    TESSERA_EXPECT(others_are_shared == std::vector<bool>(4, false));
    // Of the size of a gradient, but not made in backward.
    TESSERA_EXPECT(!shared_place(at::empty({401, 399})));
  };
  run_processes(2, body, {.backend = "shm"});
}

namespace {

/// What oneDNN convolves, whose memory of its own it asks for by the address alone.
struct ImagesImpl : torch::nn::Module {
  ImagesImpl() {
    first = register_module("first", tessera::nn::Conv2d(nn::Conv2dOptions(64, 64, 3)));
    second = register_module("second", tessera::nn::Conv2d(nn::Conv2dOptions(64, 64, 3)));
  }
  at::Tensor forward(const at::Tensor& x) { return second(first(x).relu()); }

  tessera::nn::Conv2d first{nullptr}, second{nullptr};
};
TESSERA_MODULE(Images);

}  // namespace

TEST_CASE("fully_shard over shm: convolutions equal one process") {
  const auto body = [](int rank) {
    enable_shared_gradients();
    Images reference, sharded;
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    fully_shard(sharded->first);
    fully_shard(sharded->second);
    fully_shard(sharded);
    const auto run = [](Images& model, int r) {
      const auto images = make_batch(static_cast<uint64_t>(r), 2 * 64 * 7, 7).view({2, 64, 7, 7});
      auto loss = weighted_loss(model(images));
      loss.backward();
      return loss.detach();
    };
    for (int step = 0; step < 2; ++step) {
      reference->zero_grad();
      sharded->zero_grad();
      average_reference(*reference, 2, [&](int r) { run(reference, r); });
      run(sharded, rank);
      check_sharded_parity(reference, sharded, {.tolerance = {.rtol = 1e-5, .atol = 1e-6}});
    }
  };
  run_processes(2, body, {.backend = "shm"});
}

TEST_CASE("fully_shard over shm: memory that is asked for by its address alone, before, in and after a backward") {
  const auto body = [](int rank) {
    enable_shared_gradients();
    Tower tower(401, 399);
    shard_tower(tower);
    constexpr size_t kBytes = 401 * 399 * sizeof(float);
    auto& allocator = *c10::GetAllocator(c10::kCPU);
    void* const before = allocator.raw_allocate(kBytes);
    void* inside = nullptr;
    tower->blocks[1]->up->weight.register_hook([&](const at::Tensor& grad) {
      inside = allocator.raw_allocate(kBytes);
      std::memset(inside, 1, kBytes);
      TESSERA_EXPECT(shared_place(at::empty({401, 399})).has_value());
      allocator.raw_deallocate(before);
      void* const short_lived = allocator.raw_allocate(kBytes);
      allocator.raw_deallocate(short_lived);
      return grad;
    });
    tower(make_batch(static_cast<uint64_t>(rank), 3, 5)).sum().backward();
    allocator.raw_deallocate(inside);
    TESSERA_EXPECT(!shared_place(at::empty({401, 399})));
  };
  run_processes(2, body, {.backend = "shm"});
}

TEST_CASE("fully_shard over shm: after a backward that throws, memory is not shared any more") {
  const auto body = [](int rank) {
    enable_shared_gradients();
    Tower tower(401, 399);
    shard_tower(tower);
    const auto x = make_batch(static_cast<uint64_t>(rank), 3, 5);
    tower->blocks[0]->up->weight.register_hook([&](const at::Tensor&) { throw ValueError("of a hook"); });
    expect_throws<ValueError>([&] { tower(x).sum().backward(); }, "of a hook");
    TESSERA_EXPECT(!shared_place(at::empty({401, 399})));
    barrier(default_group());
  };
  run_processes(2, body, {.backend = "shm"});
}

TEST_CASE("fully_shard over shm: float32 shards come to the other ranks in the dtype of compute, 2 to 4 processes") {
  for (const int world_size : {2, 3, 4}) {
    const auto body = [&](int rank) {
      Tower reference(401, 399), sharded(401, 399);
      fill_parameters(*reference, 1);
      fill_parameters(*sharded, 1);
      const MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      shard_tower(sharded, {.mp_policy = policy});
      reference->to(at::kBFloat16);
      const at::NoGradGuard no_grad;
      for (int round = 0; round < 3; ++round) {
        const auto x = make_batch(static_cast<uint64_t>(rank), 3, 5).to(at::kBFloat16);
        expect_bit_equal(sharded(x), reference(x));
        for (auto* model : {&reference, &sharded}) {
          for (const auto& parameter : (*model)->parameters()) {
            parameter.mul_(-2);
          }
        }
      }
      // All shards of blocks are read where they lie, as float32.
      TESSERA_EXPECT(mapped_peer_bytes() > (world_size - 1) * 3 * 1'250'000 / world_size);
    };
    run_processes(world_size, body, {.backend = "shm"});
  }
}

TEST_CASE("fully_shard over shm: shards of several dtypes that the other ranks read where they lie") {
  const auto body = [](int rank) {
    constexpr int64_t kDim = 801, kHidden = 799;
    auto reference = make_lora(kDim, kHidden), sharded = make_lora(kDim, kHidden);
    for (auto& block : sharded->blocks) {
      fully_shard(block);
    }
    fully_shard(sharded);
    for (int round = 0; round < 3; ++round) {
      const auto run = [&](Lora& model, int r) {
        auto loss = weighted_loss(model(make_batch(static_cast<uint64_t>(3 * round + r), 3, 5)));
        loss.backward();
        return loss.detach();
      };
      average_reference(*reference, 3, [&](int r) { run(reference, r); });
      sharded->zero_grad();
      const auto loss = run(sharded, rank);
      check_sharded_parity(reference, sharded, {.tolerance = {.rtol = 0, .atol = 0}});
      const at::NoGradGuard no_grad;
      for (auto* model : {&reference, &sharded}) {
        for (const auto& parameter : (*model)->parameters()) {
          if (parameter.is_floating_point()) {
            parameter.mul_(0.9);
          }
        }
      }
    }
    // Two blocks, of 2.6 MB and some adapters.
    TESSERA_EXPECT(mapped_peer_bytes() > 2 * 2 * 2'500'000 / 3);
  };
  run_processes(3, body, {.backend = "shm"});
}

TEST_CASE("fully_shard over shm: asynchronous unshards before the first forward are finished by it") {
  const auto body = [](int rank) {
    for (int i = 0; i < 5; ++i) {
      Tower reference(401, 399), sharded(401, 399);
      fill_parameters(*reference, 1);
      fill_parameters(*sharded, 1);
      shard_tower(sharded);
      fsdp(sharded->blocks[1]).unshard(/*async_op=*/true);
      fsdp(sharded).unshard(/*async_op=*/true);
      const at::NoGradGuard no_grad;
      const auto x = make_batch(static_cast<uint64_t>(rank), 3, 5);
      expect_bit_equal(sharded(x), reference(x));
    }
  };
  run_processes(3, body, {.backend = "shm"});
}

namespace {

/// Two units, and a rank that sleeps before the first, or between them.
struct NappingImpl : torch::nn::Module {
  struct Naps {
    std::chrono::milliseconds before_first{0}, between{0};
  };
  NappingImpl(Naps naps_, int64_t dim) : naps(naps_) {
    first = register_module("first", Block(dim, dim));
    second = register_module("second", Block(dim, dim));
  }
  at::Tensor forward(at::Tensor x) {
    std::this_thread::sleep_for(naps.before_first);
    x = first(x);
    std::this_thread::sleep_for(naps.between);
    return second(x);
  }

  Naps naps;
  Block first{nullptr}, second{nullptr};
};
TESSERA_MODULE(Napping);

}  // namespace

TEST_CASE("fully_shard over shm: parameters that a fast rank changes after forward are not what a slow one reads") {
  const auto body = [](int rank) {
    constexpr int64_t kDim = 397;
    // Rank 1 asks for the second unit before rank 0 lends its part, and reads it long after rank 0 has computed.
    using std::chrono::milliseconds;
    const NappingImpl::Naps naps{.before_first = milliseconds(rank == 0 ? 100 : 0),
                                 .between = milliseconds(rank == 1 ? 500 : 0)};
    Napping reference(NappingImpl::Naps{}, kDim), sharded(naps, kDim);
    fill_parameters(*reference, 1);
    fill_parameters(*sharded, 1);
    fully_shard(sharded->first);
    fully_shard(sharded->second);
    fully_shard(sharded);
    const at::NoGradGuard no_grad;
    const auto x = make_batch(1, 3, kDim);
    for (int round = 0; round < 3; ++round) {
      expect_bit_equal(sharded(x), reference(x));
      for (const auto& parameter : sharded->parameters()) {
        to_local(parameter.detach()).mul_(-2);
      }
      for (const auto& parameter : reference->parameters()) {
        parameter.mul_(-2);
      }
    }
  };
  run_processes(2, body, {.backend = "shm"});
}

}  // namespace tessera::testing
