// Checkpoints: saved by three ranks in the background, read by two. `./bazelw run //examples:checkpoint`
//
// Three ranks train a network for 15 steps and end there, as if the machine had been taken away. Two ranks load the
// last checkpoint and continue to step 30. Their parameters equal those of a model that one process trained without a
// break.

#include "checkpoint/checkpoint.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "checkpoint/checkpointer.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "fully_shard/fully_shard.h"
#include "nn/linear.h"
#include "testing/parity.h"

using namespace tessera;

namespace {

constexpr const char* kFolder = "CHECKPOINT_FOLDER";

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(0);  // the same initial values on every rank
    up = register_module("up", nn::Linear(8, 17));
    down = register_module("down", nn::Linear(17, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return down(up(x).tanh()); }

  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Net);

// Runs a step on this rank's rows of the batch. The batch is the same for any number of ranks.
void train(Net& net, torch::optim::Optimizer& optimizer, int64_t step, int64_t rank, int64_t ranks) {
  torch::manual_seed(static_cast<uint64_t>(step) + 1);
  const at::Tensor batch = at::randn({12, 8});
  const at::Tensor rows = batch.narrow(0, 12 / ranks * rank, 12 / ranks);
  optimizer.zero_grad();
  (net(rows) - rows.sum(1, /*keepdim=*/true).sin()).square().mean().backward();
  optimizer.step();
}

int64_t load(const std::string& path, Net& net, torch::optim::Optimizer& optimizer) {
  dcp::State state{.model = dcp::get_model_state_dict(net),  // handles: load writes into the parameters
                   .optimizer = dcp::optimizer_state_to_load(path, net, optimizer),
                   .user = {{"step", int64_t{0}}}};
  dcp::load(path, state);
  dcp::set_optimizer_state_dict(net, optimizer, state.optimizer);
  return std::get<int64_t>(state.user.at("step"));
}

void run_rank(const std::string& folder) {
  init_process_group();
  const int64_t rank = get_rank(), ranks = get_world_size();
  const DeviceMesh mesh = init_device_mesh(at::kCPU, {ranks}, {"dp"});
  Net net;
  fully_shard(net->up, {.mesh = mesh});
  fully_shard(net, {.mesh = mesh});
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);

  dcp::Checkpointer checkpointer(folder, {.keep_last = 2});
  int64_t step = 0, end = 15;
  if (const auto path = checkpointer.latest()) {
    step = load(*path, net, optimizer);
    end = 30;
    if (rank == 0) {
      fmt::print("{} ranks go on from step {}\n", ranks, step);
    }
  }
  while (step < end) {
    train(net, optimizer, step++, rank, ranks);
    if (step % 5 == 0) {
      checkpointer.async_save(step, {.model = dcp::get_model_state_dict(net),
                                     .optimizer = dcp::get_optimizer_state_dict(net, optimizer),
                                     .user = {{"step", step}}});  // returns when the bytes are copied
    }
  }
  checkpointer.wait();

  if (end == 30) {
    Net reference;
    torch::optim::AdamW reference_optimizer(reference->parameters(), 1e-2);
    for (int64_t k = 0; k < end; ++k) {
      train(reference, reference_optimizer, k, 0, 1);
    }
    check_sharded_parity(reference, net, {.tolerance = {.rtol = 1e-3, .atol = 1e-4}});
    dcp::export_safetensors(folder + "/net.safetensors", dcp::get_model_state_dict(net));  // one file, for Python
  }
  if (rank == 0) {
    fmt::print("{} ranks ended at step {}{}\n", ranks, end, end == 30 ? ", with the parameters of one process" : "");
  }
  destroy_process_group();
}

}  // namespace

int main() {
  if (launched_as_rank()) {
    const char* const folder = std::getenv(kFolder);
    return report_errors([&] { run_rank(folder ? folder : "checkpoints"); });
  }
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("tessera_checkpoint_{}", getpid());
  const auto launch = [&](int ranks) { return launch_local({.nproc = ranks, .environment = {{kFolder, folder}}}); };
  int exit_code = launch(3);
  exit_code = exit_code == 0 ? launch(2) : exit_code;
  std::filesystem::remove_all(folder);
  return exit_code;
}
