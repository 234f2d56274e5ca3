// Models that are built without memory, sharded, given memory for their shards, and initialized: equal to one process.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adam.h>

#include "dtensor/dtensor.h"
#include "dtensor/random/random.h"
#include "fully_shard/replicate.h"
#include "fully_shard/to_empty.h"
#include "nn/meta_device.h"
#include "nn/reset_parameters.h"
#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr uint64_t kSeed = 7;

/// By its constructor, from the default generator: so not while ranks run.
Tower seeded_tower(int64_t dim, int64_t hidden) {
  at::manual_seed(kSeed);
  return Tower(dim, hidden);
}

Tower tower_on_meta(int64_t dim, int64_t hidden) {
  const MetaDeviceGuard on_meta;
  return Tower(dim, hidden);
}

void initialize(Tower& tower) {
  to_empty(tower, at::kCPU);
  tessera::manual_seed(kSeed);
  reset_parameters(*tower);
}

Tower copy_of(Tower& source, int64_t dim, int64_t hidden) {
  Tower copy(dim, hidden);
  const at::NoGradGuard no_grad;
  for (const auto& item : source->named_parameters()) {
    copy->named_parameters()[item.key()].copy_(item.value());
  }
  return copy;
}

/// Compares with `expected` after the init and for three steps of Adam.
void init_and_train(int rank, int world_size, Tower& expected, Tower& tower, torch::optim::Adam& optimizer) {
  check_sharded_parity(expected, tower, kExact);
  torch::optim::Adam reference_optimizer(expected->parameters(), torch::optim::AdamOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss_of(tower, 10 * step + rank).backward();
    average_reference(*expected, world_size, [&](int r) { loss_of(expected, 10 * step + r).backward(); });
    check_sharded_parity(expected, tower, kExact);
    optimizer.step();
    reference_optimizer.step();
    check_sharded_parity(expected, tower, kExact);
  }
}

struct TiedEmbeddingImpl : torch::nn::Module {
  TiedEmbeddingImpl() {
    embedding = register_module("embedding", tessera::nn::Embedding(7, 4));
    head = register_module("head", tessera::nn::Linear(torch::nn::LinearOptions(4, 7).bias(false)));
    tie_parameter(*head, "weight", embedding->weight);
    mask = register_buffer("mask", torch::ones({4}));
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(embedding(tokens) * mask); }

  tessera::nn::Embedding embedding{nullptr};
  tessera::nn::Linear head{nullptr};
  at::Tensor mask;
};
TESSERA_MODULE(TiedEmbedding);

}  // namespace

TEST_CASE("initial values of sharded models equal those of one process, and so does training", "[meta_init]") {
  const int world_size = GENERATE(1, 2, 3, 4);
  const auto [dim, hidden] = GENERATE(std::pair<int64_t, int64_t>{16, 8}, std::pair<int64_t, int64_t>{17, 13},
                                      std::pair<int64_t, int64_t>{3, 2});
  const bool optimizer_first = GENERATE(true, false);
  CAPTURE(world_size, dim, hidden, optimizer_first);
  auto reference = seeded_tower(dim, hidden);
  run_ranks(world_size, [&, dim = dim, hidden = hidden](int rank) {
    auto expected = copy_of(reference, dim, hidden);
    auto tower = tower_on_meta(dim, hidden);
    std::optional<torch::optim::Adam> optimizer;
    if (optimizer_first) {
      optimizer.emplace(tower->parameters(), torch::optim::AdamOptions(1e-2));
    }
    shard_tower(tower);
    initialize(tower);
    if (!optimizer_first) {
      optimizer.emplace(tower->parameters(), torch::optim::AdamOptions(1e-2));
    }
    init_and_train(rank, world_size, expected, tower, *optimizer);
  });
}

TEST_CASE("replicas, HSDP and another sharded dim are initialized alike", "[meta_init]") {
  auto reference = seeded_tower(17, 13);
  run_ranks(4, [&](int rank) {
    const auto shard = [&](int kind, Tower& tower) {
      if (kind == 0) {
        for (auto& block : tower->blocks) {
          replicate(block);
        }
        replicate(tower);
      } else if (kind == 1) {
        shard_tower(tower, {.mesh = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "dp"})});
      } else {
        shard_tower(tower, {.shard_placement_fn = [](const at::Tensor& param) {
                      return std::optional(Shard(param.dim() - 1));
                    }});
      }
    };
    for (int kind = 0; kind < 3; ++kind) {
      auto tower = tower_on_meta(17, 13);
      shard(kind, tower);
      initialize(tower);
      for (const auto& item : reference->named_parameters()) {
        expect_bit_equal(full_tensor(tower->named_parameters()[item.key()].detach()), item.value().detach());
      }
      TESSERA_EXPECT(loss_of(tower, rank).isfinite().item<bool>());
    }
  });
}

TEST_CASE("on top of tensor parallelism only the doubly cut parts get memory", "[meta_init]") {
  auto reference = seeded_tower(17, 13);
  run_ranks(4, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2}, {"dp", "tp"});
    auto tower = tower_on_meta(17, 13);
    parallelize_tower(tower, mesh["tp"]);
    TESSERA_EXPECT(is_dtensor(tower->blocks[0]->up->weight) && tower->blocks[0]->up->weight.is_meta());
    shard_tower(tower, {.mesh = mesh["dp"]});
    initialize(tower);
    expect_equal(placements(tower->blocks[0]->up->weight), (Placements{Shard(0, 1), Shard(0)}));
    for (const auto& item : reference->named_parameters()) {
      expect_bit_equal(full_tensor(tower->named_parameters()[item.key()].detach()), item.value().detach());
    }
    const int64_t dp_rank = mesh["dp"].local_rank();
    auto expected = copy_of(reference, 17, 13);
    expect_close(loss_of(tower, static_cast<int>(dp_rank)).detach(),
                 loss_of(expected, static_cast<int>(dp_rank)).detach());
  });
}

TEST_CASE("tensor-parallel and plain parameters that no unit has get memory too", "[meta_init]") {
  auto reference = seeded_tower(17, 13);
  run_ranks(2, [&](int rank) {
    const auto mesh = init_device_mesh(at::kCPU, {2}, {"tp"});
    auto tower = tower_on_meta(17, 13);
    parallelize_tower(tower, mesh);
    tower->register_buffer("kept", at::ones({2}, at::kCPU));
    to_empty(tower, at::kCPU);
    TESSERA_EXPECT(tower->in->weight.is_cpu() && !is_dtensor(tower->in->weight));
    TESSERA_EXPECT(tower->blocks[0]->up->weight.is_cpu());
    expect_equal(to_local(tower->blocks[0]->up->weight).size(0), rank == 0 ? 7 : 6);
    expect_bit_equal(tower->named_buffers()["kept"], at::ones({2}));
    tessera::manual_seed(kSeed);
    reset_parameters(*tower->blocks[0]);
    const auto weight = full_tensor(tower->blocks[0]->up->weight.detach());
    TESSERA_EXPECT(weight.abs().max().item<float>() <= 1 / std::sqrt(17.f) && weight.std().item<float>() > 0.05f);
  });
}

TEST_CASE("tables with a padding row, and a module under two names, are initialized as they were built",
          "[meta_init]") {
  struct TablesImpl : torch::nn::Module {
    TablesImpl() {
      words = register_module("words", nn::Embedding(nn::EmbeddingOptions(11, 4).padding_idx(3)));
      bags = register_module("bags", nn::EmbeddingBag(nn::EmbeddingBagOptions(7, 4).padding_idx(5)));
      same_words = register_module("same_words", words);
      out = register_module("out", nn::Linear(4, 3));
    }
    at::Tensor forward(const at::Tensor& x) { return out(words(x)); }
    nn::Embedding words{nullptr}, same_words{nullptr};
    nn::EmbeddingBag bags{nullptr};
    nn::Linear out{nullptr};
  };
  using Tables = Hooked<TablesImpl>;
  const int world_size = GENERATE(1, 2, 3);
  at::manual_seed(kSeed);
  const auto expected = std::make_shared<Tables>();
  run_ranks(world_size, [&](int) {
    const auto tables = [] {
      const MetaDeviceGuard on_meta;
      return std::make_shared<Tables>();
    }();
    fully_shard(*tables);
    to_empty(*tables, at::kCPU);
    tessera::manual_seed(kSeed);
    reset_parameters(*tables);
    check_sharded_parity(*expected, *tables, kExact);
  });
}

TEST_CASE("parameters keep their identity, ties and requires_grad; buffers get memory", "[meta_init]") {
  run_ranks(2, [](int) {
    TiedEmbedding tied{nullptr};
    {
      const MetaDeviceGuard on_meta;
      tied = TiedEmbedding();
    }
    TESSERA_EXPECT(tied->mask.is_meta());
    const auto* weight = tied->embedding->weight.unsafeGetTensorImpl();
    fully_shard(tied);
    expect_equal(fsdp(tied).num_parameters(), 1u);
    TESSERA_EXPECT(tied->head->weight.is_meta() && is_dtensor(tied->head->weight));
    to_empty(tied, at::kCPU);
    TESSERA_EXPECT(tied->embedding->weight.unsafeGetTensorImpl() == weight);
    TESSERA_EXPECT(tied->head->weight.is_same(tied->embedding->weight) && tied->head->weight.is_cpu());
    TESSERA_EXPECT(tied->head->weight.requires_grad() && tied->head->weight.is_leaf());
    TESSERA_EXPECT(tied->mask.is_cpu() && tied->named_buffers()["mask"].is_cpu());
    const at::NoGradGuard no_grad;
    tied->mask.fill_(1);
    tied->embedding->weight.fill_(2);
    expect_bit_equal(tied(at::ones({1}, at::kLong)), at::ones({1, 7}) * 16);
  });
}

TEST_CASE("a forward without memory is an error on every rank that names a parameter and the remedy", "[meta_init]") {
  const int world_size = GENERATE(1, 2, 3);
  run_ranks(world_size, [&](int) {
    auto tower = tower_on_meta(17, 13);
    shard_tower(tower);
    expect_throws<StateError>([&] { loss_of(tower, 0); }, "'in.weight' of");
    expect_throws<StateError>([&] { loss_of(tower, 0); }, "still on the meta device");
    expect_throws<StateError>([&] { loss_of(tower, 0); }, "Call to_empty(model)");
    initialize(tower);
    loss_of(tower, 0).backward();
  });
}

TEST_CASE("one rank that forgot is named on the others", "[meta_init]") {
  run_ranks(3, [](int rank) {
    auto tower = tower_on_meta(17, 13);
    shard_tower(tower);
    if (rank != 1) {
      initialize(tower);
    }
    expect_throws<StateError>(
        [&] { loss_of(tower, 0); },
        rank == 1 ? "'in.weight' of" : "rank 1: 'root', whose parameters are still on the meta device");
  });
}

TEST_CASE("to_empty refuses other devices and parts of a unit; fully_shard a mixture", "[meta_init]") {
  run_ranks(2, [](int rank) {
    auto tower = tower_on_meta(17, 13);
    shard_tower(tower);
    expect_throws<ValueError>([&] { to_empty(tower, at::kCUDA); }, "belong on cpu, but the device is cuda");
    expect_throws<ValueError>([&] { to_empty(tower, at::kMeta); }, "the meta device has no memory");
    expect_throws<StateError>([&] { to_empty(*tower->blocks[0]->up, at::kCPU); }, "'weight' belongs to the unit");
    TESSERA_EXPECT(tower->in->weight.is_meta());
    Block mixed(4, 4);
    {
      const MetaDeviceGuard on_meta;
      mixed->down = mixed->replace_module("down", tessera::nn::Linear(4, 4));
    }
    expect_throws<ValueError>([&] { fully_shard(mixed); }, "one device, but 'up.weight' is on cpu and 'down.weight'");
    Block own(4, 4), other{nullptr};
    {
      const MetaDeviceGuard on_meta;
      other = Block(4, 4);
    }
    expect_throws<ValueError>([&] { fully_shard(rank == 0 ? own : other); }, "on the meta device");
  });
}

}  // namespace tessera::testing
