// What a rank allocates in a step, counted below libtorch: the most bytes at one time against the formula (shards of
// parameters, gradients and Adam's two moments, two units with their gradients, activations), and how often.

#include <ATen/TensorOperators.h>
#include <torch/optim/adam.h>

#include <array>
#include <atomic>

#include "fully_shard/to_empty.h"
#include "nn/meta_device.h"
#include "testing/count_allocations.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

struct Sizes {
  int64_t dim = 256, hidden = 1024, blocks = 5, batch = 32;

  int64_t unit() const { return 4 * (2 * dim * hidden + dim + hidden); }
  int64_t parameters() const { return blocks * unit() + 4 * ((5 + 1) * dim + 2 * dim + 3 * (dim + 1)); }
  /// Of a block: its input, for up, and the output of tanh, for tanh and down.
  int64_t activations() const { return blocks * 4 * batch * (dim + hidden); }
  /// Of a rank, in a step.
  int64_t peak(int64_t ranks) const { return 4 * parameters() / ranks + 2 * 2 * unit() + activations(); }
};

}  // namespace

TEST_CASE("the peak of a step is shards, two units with their gradients, and activations", "[memory]") {
  const int world_size = GENERATE(2, 4);
  const Sizes sizes;
  const CountAllocations counting;
  std::vector<std::unique_ptr<AllocationCounter>> counters;
  for (int rank = 0; rank < world_size; ++rank) {
    counters.push_back(std::make_unique<AllocationCounter>());
  }
  std::vector<int64_t> init_peaks(static_cast<size_t>(world_size)), peaks(init_peaks);
  run_ranks(world_size, [&](int rank) {
    auto& own = *counters[static_cast<size_t>(rank)];
    const CountingScope scope(own);
    Tower tower{nullptr};
    {
      const MetaDeviceGuard on_meta;
      tower = Tower(sizes.dim, sizes.hidden, sizes.blocks);
    }
    shard_tower(tower);
    to_empty(tower, at::kCPU);
    init_peaks[static_cast<size_t>(rank)] = own.peak;
    torch::optim::Adam optimizer(tower->parameters(), torch::optim::AdamOptions(1e-3));
    const auto batch = make_batch(static_cast<uint64_t>(rank), sizes.batch, 5);
    const auto run_step = [&] {
      optimizer.zero_grad();
      weighted_loss(tower(batch)).backward();
      optimizer.step();
    };
    for (int step = 0; step < 3; ++step) {
      run_step();
    }
    own.peak = own.bytes.load();
    run_step();
    peaks[static_cast<size_t>(rank)] = own.peak;
  });
  for (int rank = 0; rank < world_size; ++rank) {
    const auto formula = static_cast<double>(sizes.peak(world_size));
    const auto peak = static_cast<double>(peaks[static_cast<size_t>(rank)]);
    CAPTURE(world_size, rank, formula, peak, sizes.unit());
    CHECK(peak > 0.9 * formula);
    CHECK(peak < 1.1 * formula);
    // Without memory, sharding and to_empty take what the shards need.
    const auto shards = static_cast<double>(sizes.parameters()) / world_size;
    CHECK(static_cast<double>(init_peaks[static_cast<size_t>(rank)]) < 1.05 * shards);
  }
}

TEST_CASE("after the first steps the engine allocates nothing", "[memory]") {
  struct Case {
    const char* name;
    FullyShardOptions options;
  };
  const auto on_last_dim = [](const at::Tensor& param) -> std::optional<Shard> { return Shard(param.dim() - 1); };
  const std::vector<Case> cases{{"peers' shards in place", {}},
                                {"kept after forward", {.reshard_after_forward = false}},
                                {"through buffers", {.shard_placement_fn = on_last_dim}},
                                {"bfloat16", {.mp_policy = {.param_dtype = at::kBFloat16}}}};
  const CountAllocations counting;
  for (const auto& [name, options] : cases) {
    CAPTURE(name);
    std::array<std::atomic<int64_t>, 2> more{};
    run_ranks(2, [&, options = options](int rank) {
      AllocationCounter own;
      const CountingScope scope(own);
      const auto dtype = options.mp_policy.param_dtype.value_or(at::kFloat);
      const auto allocations = [&](Tower& tower) {
        const auto batch = make_batch(static_cast<uint64_t>(rank), 32, 5).to(dtype);
        int64_t before = 0;
        for (int step = 0; step < 4; ++step) {
          tower->zero_grad();
          before = own.allocations;
          weighted_loss(tower(batch)).backward();
        }
        return own.allocations - before;
      };
      Tower plain(64, 96, 3), sharded(64, 96, 3);
      plain->to(dtype);
      shard_tower(sharded, options);
      const int64_t of_plain = allocations(plain);
      more[static_cast<size_t>(rank)] = allocations(sharded) - of_plain;
    });
    CHECK(more[0] == 0);
    CHECK(more[1] == 0);
  }
}

}  // namespace tessera::testing
