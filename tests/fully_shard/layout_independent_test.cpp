// Training under many layouts: the same losses and parameters, bit for bit.

#include "fully_shard/layout_independent.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "dtensor/clip_grad_norm.h"
#include "dtensor/dtensor.h"
#include "fully_shard/reduce/tree_reduction.h"
#include "fully_shard/replicate.h"
#include "optim/fused_optimizers.h"
#include "testing/expect.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"
#include "testing/tensor_matchers.h"
#include "tests/fully_shard/models/small_models.h"
#include "tests/fully_shard/models/tensor_parallel_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr int64_t kSteps = 3;
constexpr double kMaxNorm = 0.5;  // below the norms of the first steps

struct DataLayout {
  std::string name;
  int ranks;
  std::function<void(Tower&)> shard;
};

DataLayout fsdp_over(int ranks, ReshardAfterForward reshard) {
  return {.name = fmt::format("FSDP over {}, reshard_after_forward {}", ranks, reshard.to_string()),
          .ranks = ranks,
          .shard = [reshard](Tower& tower) { shard_tower(tower, {.reshard_after_forward = reshard}); }};
}

DataLayout hsdp_over(int64_t replicas, int64_t shards) {
  return {.name = fmt::format("{} replicas of shards over {}", replicas, shards),
          .ranks = static_cast<int>(replicas * shards),
          .shard = [=](Tower& tower) {
            shard_tower(tower, {.mesh = init_device_mesh(at::kCPU, {replicas, shards}, {"replicate", "shard"})});
          }};
}

/// `cap_mb`: of buckets; 0 gives each unit an all-reduce of its own.
DataLayout replicate_over(int ranks, double cap_mb) {
  return {.name = fmt::format("replicate over {}, buckets of {} MiB", ranks, cap_mb),
          .ranks = ranks,
          .shard = [cap_mb](Tower& tower) {
            if (cap_mb == 0) {
              for (auto& block : tower->blocks) {
                replicate(block, {.bucket_cap_mb = 0});
              }
            }
            replicate(tower, {.bucket_cap_mb = cap_mb});
          }};
}

DataLayout stacked(int64_t replicas, int64_t shards, int64_t tp) {
  return {.name = fmt::format("{} replicas of shards over {}, tensor parallelism over {}", replicas, shards, tp),
          .ranks = static_cast<int>(replicas * shards * tp),
          .shard = [=](Tower& tower) {
            const auto mesh = init_device_mesh(at::kCPU, {replicas, shards, tp}, {"replicate", "dp", "tp"});
            parallelize_tower(tower, mesh["tp"]);
            shard_tower(tower, {.mesh = replicas == 1 ? mesh["dp"] : mesh[{"replicate", "dp"}]});
          }};
}

bool have_same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

struct Trained {
  std::vector<double> losses;  // of each step, its norm, and of an evaluation
  std::vector<at::Tensor> params;

  bool operator==(const Trained& other) const {
    return losses == other.losses && std::ranges::equal(params, other.params, have_same_bits);
  }
};

/// A tower, and its training from the step that `folder` holds, if there is one, to `last`.
class PartTrainer {
 public:
  PartTrainer(const DataLayout& layout, int64_t parts) : tower_(filled_tower()), parts_(parts) {
    layout.shard(tower_);
    optimizer_ =
        std::make_unique<optim::FusedAdamW>(tower_->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
    gradients_ = std::make_unique<LayoutIndependentGradients>(tower_, LayoutIndependentOptions{.parts = parts});
  }

  Trained train(int64_t first, int64_t last) {
    Trained trained;
    for (int64_t step = first; step < last; ++step) {
      const auto loss_of_part = [&](int64_t part) { return loss_of(tower_, step * parts_ + part); };
      optimizer_->zero_grad();
      trained.losses.push_back(gradients_->backward(loss_of_part));
      trained.losses.push_back(gradients_->clip_grad_norm(kMaxNorm).item<double>());
      optimizer_->step();
      trained.losses.push_back(gradients_->evaluate(loss_of_part));
    }
    for (const auto& param : tower_->parameters()) {
      trained.params.push_back(full_tensor(param.detach()).clone());
    }
    return trained;
  }
  dcp::State state() {
    return {.model = dcp::get_model_state_dict(tower_),
            .optimizer = dcp::get_optimizer_state_dict(tower_, *optimizer_)};
  }
  void load(const std::string& path) {
    dcp::State state{.model = dcp::get_model_state_dict(tower_),
                     .optimizer = dcp::optimizer_state_to_load(path, tower_, *optimizer_)};
    dcp::load(path, state);
    dcp::set_optimizer_state_dict(tower_, *optimizer_, state.optimizer);
  }
  Tower& tower() { return tower_; }

 private:
  Tower tower_;
  int64_t parts_;
  std::unique_ptr<optim::FusedAdamW> optimizer_;
  std::unique_ptr<LayoutIndependentGradients> gradients_;
};

/// On all ranks of the layout, which agree; the result of rank 0.
Trained train_on(const DataLayout& layout, int64_t parts) {
  Trained result;
  run_ranks(layout.ranks, [&](int rank) {
    PartTrainer trainer(layout, parts);
    Trained own = trainer.train(0, kSteps);
    if (rank == 0) {
      result = std::move(own);
    }
  });
  return result;
}

}  // namespace

TEST_CASE("a rank's parts are aligned powers of two, in the order of ranks") {
  using Ranges = std::vector<TreeParts>;
  const auto ranges = [](int64_t ranks, int64_t parts) {
    Ranges result;
    result.reserve(static_cast<size_t>(ranks));
    for (int64_t rank = 0; rank < ranks; ++rank) {
      result.push_back(tree_parts(rank, ranks, parts));
    }
    return result;
  };
  CHECK((ranges(1, 8) == Ranges{{0, 8}}));
  CHECK((ranges(2, 8) == Ranges{{0, 4}, {4, 4}}));
  CHECK((ranges(3, 8) == Ranges{{0, 4}, {4, 2}, {6, 2}}));
  CHECK((ranges(5, 8) == Ranges{{0, 2}, {2, 2}, {4, 2}, {6, 1}, {7, 1}}));
  for (int64_t count = 1; count <= 40; ++count) {
    int64_t next = 0;
    for (const auto& range : ranges(count, 2 * least_parts(count))) {
      CHECK(range.first == next);
      CHECK(range.first % range.count == 0);
      CHECK((range.count == 2 || range.count == 4));
      next += range.count;
    }
    CHECK(next == 2 * least_parts(count));
  }
}

TEST_CASE("losses, norms and parameters have the same bits under any layout of data parallelism") {
  const int64_t parts = GENERATE(8, 16);
  const Trained expected = train_on(fsdp_over(1, true), parts);
  const std::vector<DataLayout> layouts = {
      fsdp_over(2, true),    fsdp_over(3, true),   fsdp_over(4, false),  fsdp_over(4, 2),      fsdp_over(8, true),
      fsdp_over(3, false),   hsdp_over(2, 1),      hsdp_over(2, 2),      hsdp_over(2, 3),      hsdp_over(4, 2),
      stacked(1, 3, 1),      replicate_over(1, 0), replicate_over(2, 0), replicate_over(3, 0), replicate_over(4, 25),
      replicate_over(8, 25), replicate_over(3, 25)};
  for (const auto& layout : layouts) {
    INFO(fmt::format("{}, {} parts", layout.name, parts));
    const Trained trained = train_on(layout, parts);
    CHECK(trained.losses == expected.losses);
    CHECK((trained == expected));
  }
}

TEST_CASE("beside tensor parallelism, the bits do not depend on data parallelism, and are close to those without it") {
  const Trained plain = train_on(fsdp_over(1, true), /*parts=*/8);
  for (const int64_t tp : {2, 3}) {
    const Trained expected = train_on(stacked(1, 1, tp), /*parts=*/8);
    for (size_t i = 0; i < plain.losses.size(); ++i) {
      CHECK(std::abs(expected.losses[i] - plain.losses[i]) < 1e-6 * std::abs(plain.losses[i]));
    }
    for (size_t i = 0; i < plain.params.size(); ++i) {
      expect_close(expected.params[i], plain.params[i]);
    }
    for (const auto& layout : {stacked(1, 2, tp), stacked(1, 4, tp), stacked(2, 2, tp)}) {
      INFO(layout.name);
      const Trained trained = train_on(layout, /*parts=*/8);
      CHECK(trained.losses == expected.losses);
      CHECK((trained == expected));
    }
  }
}

TEST_CASE("parameters in bfloat16 and gradients reduced in float32 have the same bits on any number of ranks") {
  const auto in_bfloat16 = [](int ranks) {
    return DataLayout{.name = fmt::format("bfloat16 over {}", ranks), .ranks = ranks, .shard = [](Tower& tower) {
                        shard_tower(tower, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
                      }};
  };
  const Trained expected = train_on(in_bfloat16(1), /*parts=*/8);
  for (const int ranks : {2, 3, 4}) {
    INFO(ranks);
    CHECK((train_on(in_bfloat16(ranks), /*parts=*/8) == expected));
  }
}

TEST_CASE("a run goes on under another layout with the same bits") {
  const TempFolder folder;
  const Trained expected = train_on(fsdp_over(1, true), /*parts=*/8);
  const auto first = fsdp_over(4, true);
  run_ranks(first.ranks, [&](int) {
    PartTrainer trainer(first, /*parts=*/8);
    trainer.train(0, 2);
    dcp::save(folder.path("run"), trainer.state());
  });
  for (const auto& layout : {fsdp_over(3, true), hsdp_over(2, 3), replicate_over(2, 25)}) {
    run_ranks(layout.ranks, [&](int) {
      PartTrainer trainer(layout, /*parts=*/8);
      trainer.load(folder.path("run"));
      const Trained trained = trainer.train(2, kSteps);
      TESSERA_EXPECT(std::ranges::equal(trained.losses, std::vector(expected.losses.end() - 3, expected.losses.end())));
      for (size_t i = 0; i < trained.params.size(); ++i) {
        expect_bit_equal(trained.params[i], expected.params[i]);
      }
    });
  }
}

TEST_CASE("gradients and their norm are those of the mean loss, added to what is there") {
  auto reference = filled_tower();
  at::Tensor sum = at::zeros({});
  for (int64_t part = 0; part < 4; ++part) {
    sum = sum + loss_of(reference, part);
  }
  (sum / 4).backward();
  const double loss = sum.item<double>() / 4;
  const double norm = get_total_norm([&] {
                        std::vector<at::Tensor> gradients;
                        for (const auto& param : reference->parameters()) {
                          gradients.push_back(param.grad());
                        }
                        return gradients;
                      }())
                          .item<double>();
  run_ranks(3, [&](int) {
    auto tower = filled_tower();
    fsdp_over(3, true).shard(tower);
    LayoutIndependentGradients gradients(tower, {.parts = 4});
    const auto loss_of_part = [&](int64_t part) { return loss_of(tower, part); };
    const auto expect_near = [](double actual, double wanted) {
      TESSERA_EXPECT(std::abs(actual - wanted) < 1e-5 * wanted);
    };
    for (const int times : {1, 2}) {
      expect_near(gradients.backward(loss_of_part), loss);
      const auto params = tower->parameters();
      for (size_t i = 0; i < params.size(); ++i) {
        expect_close(full_tensor(params[i].grad()), times * reference->parameters()[i].grad());
      }
      expect_near(gradients.clip_grad_norm(1e9).item<double>(), times * norm);
    }
    expect_near(gradients.evaluate(loss_of_part), loss);
    gradients.clip_grad_norm(0.1);
    expect_near(clip_grad_norm_(tower->parameters(), 1e9).item<double>(), 0.1);
  });
}

TEST_CASE("LayoutIndependentGradients refuses what it cannot do") {
  const auto expect_refused = [](int ranks, const std::function<void(Tower&)>& shard, int64_t parts,
                                 const std::string& part) {
    run_ranks(ranks, [&](int) {
      auto tower = filled_tower();
      shard(tower);
      expect_throws<Error>([&] { LayoutIndependentGradients(tower, {.parts = parts}); }, part);
    });
  };
  const auto shard = [](Tower& tower) { shard_tower(tower); };
  expect_refused(3, shard, 6, "6 parts for 3 ranks; it must be a power of two, at least 4");
  expect_refused(3, shard, 2, "2 parts for 3 ranks; it must be a power of two, at least 4");
  expect_refused(
      1, [](Tower&) {}, 8, "is no unit, or has no parameters; call fully_shard or replicate on it");
  expect_refused(3, hsdp_over(3, 1).shard, 8, "3 replicas of shards over 1 ranks; their number must be a power of two");
  expect_refused(
      3, [](Tower& tower) { shard_tower(tower, {.mp_policy = {.reduce_dtype = at::kBFloat16}}); }, 8,
      "set reduce_dtype to float32");
  expect_refused(
      2, [](Tower& tower) { shard_tower(tower, {.ignored_params = {tower->in->weight}}); }, 8,
      "parameter 'in.weight' requires a gradient, but is in no unit");
  expect_refused(
      2,
      [](Tower& tower) {
        shard_tower(tower, {.shard_placement_fn = [](const at::Tensor& param) {
                      return param.dim() == 2 ? std::optional(Shard(1)) : std::nullopt;
                    }});
      },
      8, "leave out shard_placement_fn");
  expect_refused(6, stacked(1, 3, 2).shard, 8, "3 ranks of data parallelism beside tensor parallelism");
}

}  // namespace tessera::testing
