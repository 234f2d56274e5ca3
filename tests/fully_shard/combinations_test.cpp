// Every combination of mesh, reshard mode, precision, offloading and accumulation equals one process bit for bit.

#include <ATen/TensorOperators.h>
#include <torch/optim/sgd.h>

#include "testing/expect.h"
#include "testing/parity.h"
#include "testing/run_ranks.h"
#include "tests/fully_shard/models/small_models.h"
#include "third_party/catch2/catch.h"

namespace tessera::testing {

namespace {

constexpr int kOptimizerSteps = 2;
constexpr int kMicroBatches = 2;
constexpr double kLearningRate = 0.5;

enum class Accumulation { Reduced, WithoutSync };

struct Mode {
  std::vector<int64_t> mesh;  // ranks, or replicas and shards
  FullyShardOptions options;
  Accumulation accumulation;

  int64_t shards() const { return mesh.back(); }
  int64_t replicas() const { return mesh.size() == 2 ? mesh[0] : 1; }
  at::ScalarType compute_dtype() const { return options.mp_policy.param_dtype.value_or(at::kFloat); }
  at::ScalarType reduce_dtype() const { return options.mp_policy.reduce_dtype.value_or(at::kFloat); }
};

using Grads = std::vector<at::Tensor>;

at::Tensor micro_batch_of(int step, int micro, int64_t rank) {
  return make_batch(static_cast<uint64_t>(1000 * step + 100 * micro + rank), 2, 5);
}

/// The gradients of one rank's batch at `values`, in the dtype in which they are reduced.
Grads grads_of(const Mode& mode, Tower& scratch, const Grads& values, const at::Tensor& batch) {
  const auto params = scratch->parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].set_data(values[i].to(mode.compute_dtype()));
    params[i].mutable_grad() = at::Tensor();
  }
  weighted_loss(scratch(batch.to(mode.compute_dtype())).to(at::kFloat)).backward();
  Grads grads;
  for (const auto& param : params) {
    grads.push_back(param.grad().to(mode.reduce_dtype()));
  }
  return grads;
}

void add_to(Grads& sums, const Grads& terms) {
  for (size_t i = 0; i < terms.size(); ++i) {
    i < sums.size() ? static_cast<void>(sums[i].add_(terms[i])) : sums.push_back(terms[i].clone());
  }
}

/// As the ranks add up: over the shards first, then over the replicas. In the dtype in which gradients are reduced.
Grads averaged(const Mode& mode, const std::function<Grads(int64_t rank)>& grads_of_rank) {
  Grads total;
  for (int64_t replica = 0; replica < mode.replicas(); ++replica) {
    Grads sums;
    for (int64_t shard = 0; shard < mode.shards(); ++shard) {
      add_to(sums, grads_of_rank(replica * mode.shards() + shard));
    }
    for (auto& sum : sums) {
      sum.div_(mode.shards());
    }
    add_to(total, sums);
  }
  for (auto& sum : total) {
    sum.div_(mode.replicas());
  }
  return total;
}

Grads expected_grads(const Mode& mode, Tower& scratch, const Grads& values, int step) {
  const auto micro_grads = [&](int micro, int64_t rank) {
    return grads_of(mode, scratch, values, micro_batch_of(step, micro, rank));
  };
  const auto in_float = [](Grads grads) {
    for (auto& grad : grads) {
      grad = grad.to(at::kFloat);
    }
    return grads;
  };
  if (mode.accumulation == Accumulation::WithoutSync) {
    return in_float(averaged(mode, [&](int64_t rank) {
      Grads own;
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        add_to(own, micro_grads(micro, rank));
      }
      return own;
    }));
  }
  Grads sums;  // what is added to them is not rounded to float32 first
  for (int micro = 0; micro < kMicroBatches; ++micro) {
    const auto terms = averaged(mode, [&](int64_t rank) { return micro_grads(micro, rank); });
    micro == 0 ? static_cast<void>(sums = in_float(terms)) : add_to(sums, terms);
  }
  return sums;
}

void train_in_mode(const Mode& mode, int rank) {
  Tower reference(6, 3, 2), scratch(6, 3, 2), tower(6, 3, 2);
  fill_parameters(*reference, 1);
  fill_parameters(*tower, 1);
  auto options = mode.options;
  const bool has_replicas = mode.mesh.size() == 2;
  options.mesh = init_device_mesh(
      at::kCPU, mode.mesh, has_replicas ? std::vector<std::string>{"replicate", "dp"} : std::vector<std::string>{"dp"});
  shard_tower(tower, options);
  torch::optim::SGD optimizer(tower->parameters(), torch::optim::SGDOptions(kLearningRate));
  for (int step = 0; step < kOptimizerSteps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      fsdp(tower).set_requires_gradient_sync(mode.accumulation == Accumulation::Reduced || micro == kMicroBatches - 1);
      weighted_loss(tower(micro_batch_of(step, micro, rank)).to(at::kFloat)).backward();
    }
    Grads values;
    for (const auto& param : reference->parameters()) {
      values.push_back(param.detach());
    }
    const auto grads = expected_grads(mode, scratch, values, step);
    for (size_t i = 0; i < values.size(); ++i) {
      reference->parameters()[i].mutable_grad() = grads[i];
    }
    check_sharded_parity(reference, tower, {.tolerance = {.rtol = 0, .atol = 0}});
    optimizer.step();
    for (size_t i = 0; i < values.size(); ++i) {
      values[i].add_(grads[i], -kLearningRate);
    }
  }
  check_sharded_parity(reference, tower, {.tolerance = {.rtol = 0, .atol = 0}});
}

}  // namespace

TEST_CASE("mesh x reshard mode x precision x offloading x accumulation equals one process", "[combinations]") {
  using Shape = std::vector<int64_t>;
  const auto mesh = GENERATE(Shape{1}, Shape{2}, Shape{3}, Shape{4}, Shape{2, 2}, Shape{2, 1}, Shape{1, 2});
  const auto accumulation = GENERATE(Accumulation::Reduced, Accumulation::WithoutSync);
  const MixedPrecisionPolicy policies[] = {{}, {.param_dtype = at::kBFloat16}, {.reduce_dtype = at::kDouble}};
  for (const auto reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
    for (const auto& policy : policies) {
      for (const bool offloads : {false, true}) {
        const Mode mode{.mesh = mesh,
                        .options = {.reshard_after_forward = reshard,
                                    .mp_policy = policy,
                                    .offload_policy = offloads ? std::optional(CPUOffloadPolicy{}) : std::nullopt},
                        .accumulation = accumulation};
        if (reshard.group_size() && mode.shards() % 2 != 0) {
          continue;
        }
        CAPTURE(mesh, reshard.to_string(), mode.compute_dtype(), mode.reduce_dtype(), offloads,
                accumulation == Accumulation::Reduced);
        run_ranks(static_cast<int>(mode.shards() * mode.replicas()), [&](int rank) { train_in_mode(mode, rank); });
      }
    }
  }
}

}  // namespace tessera::testing
