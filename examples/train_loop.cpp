// A training program with the usual parts: a DataLoader with a distributed sampler, gradient clipping, a learning rate
// schedule, evaluation, and a mean over the ranks to print. `./bazelw run //examples:train_loop`
//
// Two ranks learn a function of two variables from 1001 samples. The comments mark the differences from a program for
// one process.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <fmt/format.h>
#include <torch/data.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/utils.h>

#include "comm/collectives.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "dtensor/clip_grad_norm.h"
#include "fully_shard/fully_shard.h"
#include "nn/linear.h"
#include "optim/fused_optimizers.h"

using namespace tessera;

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    up = register_module("up", nn::Linear(2, 64));
    middle = register_module("middle", nn::Linear(64, 64));
    down = register_module("down", nn::Linear(64, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return down(middle(up(x).tanh()).tanh()); }

  nn::Linear up{nullptr}, middle{nullptr}, down{nullptr};
};
TESSERA_MODULE(Net);  // was TORCH_MODULE

/// Samples of sin(3 a) * b. Every rank can compute all of them; the sampler selects those that it does compute.
class Waves : public torch::data::datasets::Dataset<Waves> {
 public:
  Waves(uint64_t seed, int64_t samples)
      : points_(2 * at::rand({samples, 2}, at::detail::createCPUGenerator(seed)) - 1) {}
  torch::data::Example<> get(size_t index) override {
    const at::Tensor point = points_[static_cast<int64_t>(index)];
    return {point, ((3 * point[0]).sin() * point[1]).unsqueeze(0)};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(points_.size(0)); }

 private:
  at::Tensor points_;
};

/// Returns this rank's batches of an epoch. Every rank has the same number, since every rank takes part in each gather
/// of parameters. Two ranks do not divide 1001 samples, so the sampler repeats one (allow_duplicates).
auto make_loader(const Waves& data, const DeviceMesh& dp, size_t epoch) {
  torch::data::samplers::DistributedRandomSampler sampler(*data.size(), static_cast<size_t>(dp.size()),
                                                          static_cast<size_t>(dp.local_rank("dp")),
                                                          /*allow_duplicates=*/true);
  sampler.set_epoch(epoch);  // a new order in each epoch, equal on all ranks
  return torch::data::make_data_loader(Waves(data).map(torch::data::transforms::Stack<>()), sampler, /*options=*/32);
}

/// Returns the mean of the ranks' values.
double mean_over_ranks(double value) {
  const at::Tensor mean = at::full({}, value, at::kDouble);
  all_reduce(mean, ReduceOp::Avg, default_group());
  return mean.item<double>();
}

at::Tensor compute_loss(Net& net, const torch::data::Example<>& batch) {
  return torch::nn::functional::mse_loss(net(batch.data), batch.target);
}

double train(Net& net, optim::FusedAdamW& optimizer, const Waves& data, const DeviceMesh& dp, size_t epoch) {
  net->train();
  double sum = 0;
  int64_t count = 0;
  const auto loader = make_loader(data, dp, epoch);
  for (const auto& batch : *loader) {
    optimizer.zero_grad();
    const at::Tensor loss = compute_loss(net, batch);  // of this rank's batch
    loss.backward();                                   // gradients are averages over the ranks
    clip_grad_norm_(net->parameters(), 1.0);           // by the norm over all ranks
    optimizer.step();                                  // of this rank's rows
    sum += loss.item<double>();
    ++count;
  }
  return mean_over_ranks(sum / static_cast<double>(count));
}

double evaluate(Net& net, const Waves& data, const DeviceMesh& dp) {
  const at::NoGradGuard no_grad;
  net->eval();
  double sum = 0;
  int64_t count = 0;
  const auto loader = make_loader(data, dp, /*epoch=*/0);
  for (const auto& batch : *loader) {
    sum += compute_loss(net, batch).item<double>();
    ++count;
  }
  return mean_over_ranks(sum / static_cast<double>(count));
}

void run_rank() {
  init_process_group();
  const DeviceMesh dp = init_device_mesh(at::kCPU, {get_world_size()}, {"dp"});
  torch::manual_seed(0);  // the same initial values on every rank
  Net net;
  fully_shard(net->middle, {.mesh = dp});
  fully_shard(net, {.mesh = dp});
  optim::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(1e-4));
  torch::optim::StepLR schedule(optimizer, /*step_size=*/6, /*gamma=*/0.3);
  const Waves data(1, 1001), unseen(2, 201);

  for (size_t epoch = 1; epoch <= 20; ++epoch) {
    const double trained = train(net, optimizer, data, dp, epoch);
    schedule.step();
    const double evaluated = evaluate(net, unseen, dp);  // on every rank, as it gathers parameters
    if (get_rank() == 0 && epoch % 4 == 0) {
      fmt::print("epoch {:>2}: loss {:.5f}, of unseen samples {:.5f}\n", epoch, trained, evaluated);
    }
  }
  destroy_process_group();
}

}  // namespace

int main() {
  if (!launched_as_rank()) {
    return launch_local({.nproc = 2});
  }
  return report_errors(run_rank);
}
