// Cost of a training step under fully_shard on GPUs, and the share of its communication that computation hides:
// `./bazelw run --config=cuda //benchmarks:gpu_step -- --backend nccl --ranks 8`. Without --config=cuda it runs on
// simulated GPUs (testing/simulated_gpu), with meaningless times.
//
// The model is the GPT of the examples in bfloat16, with one unit per block. With the backend "threads", the ranks
// share one GPU, which shows the order of work but not the speed of a machine.
//
//   gpu_step/ranks               number of ranks
//   gpu_step/step_ms             forward and backward of all ranks
//   gpu_step/compute_ms          the same over the fake backend, which moves no data between ranks
//   gpu_step/communication_ms    the step's all-gathers and reduce-scatters, one after the other
//   gpu_step/overlap             (compute_ms + communication_ms - step_ms) / the smaller of the two: 1 if one hides the
//                                other completely, 0 if they alternate
//   gpu_step/host_us_per_unit    host time of a step over the fake backend, minus that of the plain model, with
//                                backward in the timed thread; on a few tokens, so that the host never waits for room
//                                in a queue of kernels
//   gpu_step/tokens_per_s        of all ranks
//
// The output also has the timeline of one step of rank 0. For each event of a unit
// (fully_shard/events/sharded_state.h), it lists the times at which the host and the computing stream reached it, in
// microseconds from the step's first event. If the GPU's time jumps at an "unshard", it waited for a gather.
//
// gpu_step_peer.py measures in PyTorch the part that needs only one GPU; tools/gpu_check runs both.

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <CLI/CLI.hpp>

#include "benchmarks/measure.h"
#include "comm/collectives.h"
#include "comm/context/rank_context.h"
#include "comm/process_group.h"
#include "examples/gpt_model.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"

namespace tessera {
namespace {

struct StepOptions {
  examples::GptConfig model{.dim = 1024, .layers = 8, .heads = 16, .context = 512};
  int64_t batch = 8;
  int ranks = 0;  // 0: 2 over threads, one a GPU over nccl
  int steps = 10;
  std::string backend = "threads";
};

constexpr int64_t kFewTokens = 32;

/// The calling rank's GPU.
c10::Device gpu() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

void wait_for_gpu() {
  c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(gpu().index());
}

struct Model {
  examples::Gpt gpt;
  std::function<void()> step;
};

Model make_model(const StepOptions& own, bool sharded) {
  examples::Gpt gpt(own.model, /*seed=*/1);
  gpt->to(gpu());
  if (sharded) {
    const FullyShardOptions options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16}};
    for (auto& block : gpt->blocks) {
      fully_shard(block, options);
    }
    fully_shard(gpt, options);
  } else {
    gpt->to(at::kBFloat16);
  }
  const auto bytes = at::randint(examples::kByteValues, {own.batch, own.model.context + 1}, at::kLong).to(gpu());
  const auto inputs = bytes.narrow(1, 0, own.model.context), targets = bytes.narrow(1, 1, own.model.context);
  return {gpt, [gpt, inputs, targets]() mutable {
            gpt->zero_grad();
            examples::next_byte_loss(gpt(inputs), targets).backward();
          }};
}

/// The step's collectives on buffers of the units' sizes: blocks are gathered in forward and in backward.
std::function<void()> make_communication(const examples::Gpt& gpt) {
  const int64_t ranks = get_world_size();
  const auto count_parameters = [](const torch::nn::Module& module) {
    int64_t numel = 0;
    for (const auto& param : module.parameters()) {
      numel += param.numel();
    }
    return numel;
  };
  std::vector<at::Tensor> shards;
  int64_t rest = count_parameters(*gpt);
  for (const auto& block : gpt->blocks) {
    rest -= count_parameters(*block);
    shards.push_back(at::empty({count_parameters(*block) / ranks}, at::dtype(at::kBFloat16).device(gpu())));
  }
  shards.push_back(at::empty({rest / ranks}, shards[0].options()));
  const auto largest = std::max_element(shards.begin(), shards.end(),
                                        [](const auto& a, const auto& b) { return a.numel() < b.numel(); });
  const auto whole = at::empty({largest->numel() * ranks}, shards[0].options());
  return [shards, whole, ranks] {
    for (const auto& shard : shards) {
      all_gather(whole.narrow(0, 0, ranks * shard.numel()), shard, default_group());
    }
    for (size_t i = 0; i < shards.size(); ++i) {
      if (i + 1 != shards.size()) {
        all_gather(whole.narrow(0, 0, ranks * shards[i].numel()), shards[i], default_group());
      }
      reduce_scatter(shards[i], whole.narrow(0, 0, ranks * shards[i].numel()), ReduceOp::Sum, default_group());
    }
  };
}

/// Returns the milliseconds of a call, including the GPU's work and waits, on all ranks of the group at once.
double gpu_ms(const std::function<void()>& call, const StepOptions& own, int rounds, const ProcessGroupPtr& group) {
  return microseconds({[&] {
                        barrier(group);
                        for (int step = 0; step < own.steps; ++step) {
                          call();
                        }
                        wait_for_gpu();
                      }},
                      wall_us, rounds, /*steps=*/1)[0] /
         own.steps / 1e3;
}

/// During its lifetime, backward runs in the calling thread, as for ranks that are threads (testing/run_ranks.h).
/// Autograd otherwise has a thread per GPU, and cpu_us would not count its time.
class BackwardInThisThread {
 public:
  BackwardInThisThread() { state().set_multithreading_enabled(false); }
  ~BackwardInThisThread() { state().set_multithreading_enabled(was_enabled_); }
  BackwardInThisThread(const BackwardInThisThread&) = delete;
  BackwardInThisThread& operator=(const BackwardInThisThread&) = delete;

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }

  const bool was_enabled_ = state().get_multithreading_enabled();
};

/// Returns the microseconds that the host computes in a call on an idle GPU.
double host_us(const std::function<void()>& call, int rounds) {
  const BackwardInThisThread guard;
  return microseconds({wait_for_gpu, call}, cpu_us, rounds, /*steps=*/1)[1];
}

struct Moment {
  FSDPEvent event;
  double host_us;
  c10::Event on_gpu;
};

void print_timeline(Model& model) {
  std::vector<Moment> moments;
  fsdp(model.gpt).set_event_observer([&](const FSDPEvent& event) {
    moments.push_back({event, wall_us(), c10::Event(c10::kCUDA, c10::EventFlag::BACKEND_DEFAULT)});
    moments.back().on_gpu.record(c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(gpu()));
  });
  model.step();
  wait_for_gpu();
  fsdp(model.gpt).set_event_observer({});
  std::vector<std::string> lines;
  lines.reserve(moments.size());
  for (const Moment& moment : moments) {
    lines.push_back(fmt::format(R"({{"event": "{}", "host_us": {:.1f}, "gpu_us": {:.1f}}})", to_string(moment.event),
                                moment.host_us - moments[0].host_us,
                                moments[0].on_gpu.elapsedTime(moment.on_gpu) * 1e3));
  }
  fmt::print("{{\"name\": \"gpu_step/timeline\", \"events\": [{}]}}\n", fmt::join(lines, ", "));
}

Results measure(const StepOptions& own, const BenchmarkOptions& options) {
  // Ranks that share a GPU would wait for each other's kernels on the default stream.
  const c10::StreamGuard stream(c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(gpu()));
  Results results;
  {
    Model model = make_model(own, /*sharded=*/true);
    results["step_ms"] = gpu_ms(model.step, own, options.rounds, default_group());
    results["communication_ms"] = gpu_ms(make_communication(model.gpt), own, options.rounds, default_group());
    if (get_rank() == 0 && options.json) {
      print_timeline(model);
    } else {
      model.step();
    }
    wait_for_gpu();
    barrier(default_group());
  }
  const int rank = get_rank(), ranks = get_world_size();
  const ProcessGroupPtr others = default_group();  // NOLINT(performance-unnecessary-copy-initialization): it changes
  const RankContextGuard guard(RankContext::create());
  init_process_group({.backend = "fake", .rank = rank, .world_size = ranks});
  {
    results["compute_ms"] = gpu_ms(make_model(own, /*sharded=*/true).step, own, options.rounds, others);
    StepOptions few = own;
    few.batch = 1;
    few.model.context = std::min<int64_t>(own.model.context, kFewTokens);
    const Model sharded = make_model(few, true), plain = make_model(few, false);
    for (int turn = 0; turn < ranks; ++turn) {  // one after the other: the driver has locks
      barrier(others);
      if (turn == rank) {
        results["host_us_per_unit"] = (host_us(sharded.step, options.rounds) - host_us(plain.step, options.rounds)) /
                                      static_cast<double>(own.model.layers);
      }
    }
    barrier(others);
  }
  destroy_process_group();
  return results;
}

void run(StepOptions own, const BenchmarkOptions& options) {
  const auto gpus = static_cast<unsigned char>(c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount());
  if (gpus == 0) {
    fmt::print("skipped: no CUDA device is visible\n");
    return;
  }
  if (own.ranks == 0) {
    own.ranks = own.backend == "threads" ? 2 : gpus;
  }
  if (own.backend == "nccl" && own.ranks < 2) {  // one rank sends nothing
    fmt::print("skipped: needs 2 CUDA devices for NCCL, has {}\n", gpus);
    return;
  }
  const auto results = own.backend == "threads" ? thread_ranks(own.ranks, [&] { return measure(own, options); })
                                                : launch_ranks(own.ranks, own.backend);
  const double step = results.at("step_ms"), compute = results.at("compute_ms");
  const double communication = results.at("communication_ms");
  const auto print = [&](const char* name, double value, const char* unit) {
    print_result(fmt::format("gpu_step/{}", name), value, unit, {}, options.json);
  };
  print("ranks", own.ranks, "");
  print("step_ms", step, "ms");
  print("compute_ms", compute, "ms");
  print("communication_ms", communication, "ms");
  if (own.ranks > 1) {  // one sends nothing
    print("overlap", (compute + communication - step) / std::min(compute, communication), "x");
  }
  print("host_us_per_unit", results.at("host_us_per_unit"), "us");
  print("tokens_per_s", static_cast<double>(own.ranks * own.batch * own.model.context) / step * 1e3, "1/s");
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;
  StepOptions own;
  const auto add_options = [&](CLI::App& app) {
    const auto number = [&](const char* name, auto& value, const char* help) {
      app.add_option(name, value, help)->check(CLI::Range(1, 1 << 20));
    };
    number("--dim", own.model.dim, "Features of a position");
    number("--layers", own.model.layers, "Blocks");
    number("--heads", own.model.heads, "Heads of attention");
    number("--context", own.model.context, "Positions of a sequence");
    number("--batch", own.batch, "Sequences of a rank");
    app.add_option("--ranks", own.ranks, "Ranks; 0: 2 over threads, one a GPU over nccl")
        ->check(CLI::NonNegativeNumber);
    number("--steps", own.steps, "Steps of a round");
    app.add_option("--backend", own.backend, "How ranks talk: threads (they share a GPU) or nccl (a GPU each)")
        ->check(CLI::IsMember({"threads", "nccl"}));
  };
  return benchmark_main(
      argc, argv,
      {.name = "gpu_step",
       .description = "A training step under fully_shard on GPUs, and what of its communication is hidden.",
       .rounds = 5,
       .add_options = add_options,
       .run = [&](const BenchmarkOptions& options) { run(own, options); },
       .on_rank = [&](const BenchmarkOptions& options) { return measure(own, options); }});
}
