// Trains a byte-level GPT under fully_shard: `./bazelw run //examples:train_gpt` (-- --help for the options).
//
// gpt_model defines the model, and trainer shards and trains it. This file starts the ranks and shows the results.

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "base/error.h"
#include "comm/local_launcher.h"
#include "comm/process_group.h"
#include "comm/rank_environment.h"
#include "comm/run_elastic.h"
#include "comm/shared_gradients.h"
#include "examples/gpt_layout.h"
#include "examples/train_gpt/byte_data.h"
#include "examples/train_gpt/loss_curve_svg.h"
#include "examples/train_gpt/model_flops.h"
#include "examples/train_gpt/parity.h"
#include "examples/train_gpt/peak_memory.h"
#include "examples/train_gpt/progress_line.h"
#include "examples/train_gpt/run_cost.h"
#include "examples/train_gpt/stop_request.h"
#include "examples/train_gpt/text_sample.h"
#include "examples/train_gpt/train_checkpoint.h"
#include "examples/train_gpt/train_device.h"
#include "examples/train_gpt/train_options.h"
#include "examples/train_gpt/trainer.h"
#include "examples/training/data_path.h"

namespace tessera::examples {
namespace {

void print(const std::string& line) {
  write_out(line + "\n");
}

std::string backend_name() {
  return get_world_size() > 1 ? get_backend(default_group()) : "one rank, no backend";
}

/// Returns, for example, "fully_shard over 2 ranks, on top of tensor parallelism over 2, activations computed again".
std::string layout_name(const TrainOptions& options) {
  const MeshShape mesh = checked_shape(options.mesh, get_world_size());
  std::string name = fmt::format("fully_shard over {} ranks", mesh.dp);
  if (mesh.replicate > 1) {
    name += fmt::format(" with {} replicas", mesh.replicate);
  }
  if (mesh.tp > 1) {
    name += fmt::format(", on top of {} parallelism over {}",
                        options.layout.sequence_parallel ? "tensor and sequence" : "tensor", mesh.tp);
  }
  switch (options.layout.recompute) {
    case Recompute::None:
      return name;
    case Recompute::Selective:
      return name + ", activations but products computed again";
    case Recompute::Full:
      return name + ", activations computed again";
  }
  return name;
}

void print_start(const TrainOptions& options, const ByteData& data, const Trainer& trainer) {
  const GptConfig& model = options.model;
  print(fmt::format("GPT over bytes: {} parameters ({} layers, dim {}, {} heads, context {}), {}", trainer.parameters(),
                    model.layers, model.dim, model.heads, model.context,
                    options.layout.bf16 ? "bfloat16 over float32 shards" : "float32"));
  print(fmt::format("{} ({}), {}{} thread{} each; {} steps of {} x {} bytes", layout_name(options), backend_name(),
                    options.layout.device == at::kCUDA ? "a GPU and " : "", options.threads,
                    options.threads == 1 ? "" : "s", options.steps, options.batch, model.context));
  print(fmt::format("data: {} ({:.2f} MB to train on, {:.2f} MB to validate)", options.data,
                    static_cast<double>(data.train_bytes()) / 1e6, static_cast<double>(data.validation_bytes()) / 1e6));
}

void print_results(const TrainOptions& options, Trainer& trainer, double seconds) {
  const LossHistory& history = trainer.history();
  const double validation = history.validation.back().loss;
  const bool first_rank = get_rank() == 0;
  if (first_rank) {
    write_loss_curve(options.svg, history,
                     fmt::format("byte GPT, {} parameters, {} ranks: validation {:.3f} nats/byte", trainer.parameters(),
                                 get_world_size(), validation));
  }
  if (options.sample_bytes > 0) {
    const std::string text = sample_text(trainer.model(), {.prompt = options.prompt,
                                                           .bytes = options.sample_bytes,
                                                           .temperature = options.temperature,
                                                           .seed = options.seed,
                                                           .device = options.layout.device});
    if (first_rank) {
      print(fmt::format("the model writes, after the prompt:\n----\n{}{}\n----", printable(options.prompt),
                        printable(text)));
    }
  }
  if (first_rank) {
    print(fmt::format("loss curve: {}", options.svg));
    print(fmt::format("validation loss {:.3f} nats/byte ({:.3f} before training), {} steps in {:.1f} s", validation,
                      history.validation.front().loss, options.steps, seconds));
  }
}

int check_parity(const TrainOptions& options, const ByteData& data, Trainer& trainer) {
  if (get_rank() == 0) {
    print("now the same in one process");
  }
  const Parity parity = compare_with_one_process(trainer, options, data);
  const Parity allowed = allowed_parity(options.layout.bf16);
  const bool holds = is_within(parity, allowed);
  if (get_rank() == 0) {
    print(
        fmt::format("{}: {} ranks against one process, largest difference of losses {:.2e} (allowed {:.0e}), of "
                    "parameters {:.2e} (allowed {:.0e})",
                    holds ? "parity" : "NO PARITY", get_world_size(), parity.max_loss_difference,
                    allowed.max_loss_difference, parity.max_parameter_difference, allowed.max_parameter_difference));
  }
  return holds ? 0 : 1;
}

/// Null without --log-dir and --metrics-port.
std::unique_ptr<TrainingLog> open_log(const TrainOptions& options, const Trainer& trainer) {
  if (options.metrics.is_none()) {
    return nullptr;
  }
  TrainingLogOptions log{.target = options.metrics,
                         .mesh = *trainer.layout().mesh,
                         .tokens_per_step = options.batch * options.model.context,
                         .peak_memory_bytes = [device = options.layout.device] { return peak_memory_bytes(device); }};
  if (options.peak_tflops) {
    log.peak_tokens_per_second =
        *options.peak_tflops * 1e12 * get_world_size() / training_flops_per_token(options.model);
  }
  return std::make_unique<TrainingLog>(std::move(log));
}

// Rank 0 trains alone then, at least as long as all ranks together did, while the others wait for it.
constexpr auto kParityTimeout = std::chrono::hours(24);

int run_rank(const TrainOptions& options, const ByteData& data) {
  at::set_num_threads(options.threads);
  enable_shared_gradients();
  ProcessGroupOptions group{.backend = backend_for(options.layout.device)};
  if (options.check_parity) {
    group.timeout = kParityTimeout;
  }
  init_process_group(group);
  Trainer trainer(options, data, Layout::sharded(make_mesh(options.mesh, options.layout.device)));
  std::unique_ptr<ProgressLine> line;
  if (get_rank() == 0) {
    print_start(options, data, trainer);
    line = std::make_unique<ProgressLine>(options);
  }
  if (const auto links = links_line(options.watch, options.layout.device); !links.empty() && get_rank() == 0) {
    print(links);
  }
  TrainCheckpoint checkpoint(trainer, options, data);
  checkpoint.resume();
  trainer.set_log(open_log(options, trainer));
  trainer.watch();
  std::optional<StopRequest> stop;
  if (options.save_every > 0) {
    stop.emplace();
  }
  const auto start = std::chrono::steady_clock::now();
  int64_t steps_done = 0;
  int signal = 0;
  trainer.run(
      [&](const Progress& progress) {
        if (line) {
          line->show(progress);
        }
      },
      [&](int64_t done) {
        steps_done = done;
        signal = stop ? stop->signal_on_any_rank() : 0;
        checkpoint.after_step(done, /*stops=*/signal != 0);
        return signal == 0;
      });
  checkpoint.finish();
  if (signal != 0) {
    if (get_rank() == 0) {
      print(fmt::format("stopped by signal {} after step {} of {}, which is saved; --resume goes on", signal,
                        steps_done, options.steps));
    }
    destroy_process_group();
    return 128 + signal;
  }
  const RunCost cost = cost_of_run(trainer, options);
  if (get_rank() == 0) {
    print(describe(cost));
  }
  print_results(options, trainer, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  const int exit_code = options.check_parity ? check_parity(options, data, trainer) : 0;
  destroy_process_group();
  return exit_code;
}

// Time from SIGINT or SIGTERM until ranks that continue are killed: a step and a checkpoint must fit into it.
constexpr auto kStopGraceWithCheckpoint = std::chrono::minutes(5);

int launch(const TrainOptions& options) {
  LaunchOptions launch = launch_options(options.restarts, options.nproc);
  if (options.save_every > 0) {
    launch.stop_grace = kStopGraceWithCheckpoint;
  }
  return launch_local(launch);
}

/// Checks the options for every number of ranks that restarts may lead to.
void check_for_restarts(const TrainOptions& options) {
  check_train_options(options, options.nproc);
  for (int ranks = options.restarts.min_ranks; ranks > 0 && ranks < options.nproc; ++ranks) {
    check_train_options(options, ranks);
  }
}

int fail(const std::exception& error, const std::string& place = "") {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  fmt::print(stderr, "train_gpt: {}{}\n", place, torch_error ? torch_error->what_without_backtrace() : error.what());
  return error_exit_code(error);
}

// Rejects all detectable errors before ranks start. Under another launcher all ranks see the same error, and one on
// each host reports it.
int run(int argc, char** argv) {
  const RankEnvironment ranks = rank_environment();
  const bool has_launcher = launched_as_rank();
  std::unique_ptr<ByteData> data;
  TrainOptions options;
  try {
    const auto parsed = parse_train_options(argc, argv);
    if (const auto* exit_now = std::get_if<ExitNow>(&parsed)) {
      return exit_now->code;
    }
    options = std::get<TrainOptions>(parsed);
    has_launcher ? check_train_options(options, ranks.world_size) : check_for_restarts(options);
    check_is_built_for(options.layout.device);
    if (!has_launcher) {
      check_local_devices(options.layout.device, options.nproc);
    }
    check_writable("--svg", options.svg);
    check_target(options.metrics);
    check_folders(options.watch);
    if (options.save_every > 0) {
      check_writable_folder("--checkpoint-dir", options.checkpoint_dir);
    }
    data = std::make_unique<ByteData>(options.data, options.model.context, options.seed);
  } catch (const std::exception& error) {
    return ranks.local_rank > 0 ? error_exit_code(error) : fail(error);
  }
  if (!has_launcher && (options.nproc > 1 || options.restarts.max_restarts > 0)) {
    data.reset();
    return launch(options);
  }
  try {
    int code = 0;
    run_elastic([&] { code = run_rank(options, *data); });
    return code;
  } catch (const std::exception& error) {
    return fail(error, ranks.world_size > 1 ? fmt::format("rank {}: ", ranks.rank) : "");
  }
}

}  // namespace
}  // namespace tessera::examples

int main(int argc, char** argv) {
  try {
    // If stdout is closed, libtorch's next socket gets its number.
    TESSERA_CHECK(Error, fcntl(STDOUT_FILENO, F_GETFD) >= 0, "stdout cannot be written: {}", std::strerror(errno));
    const int code = tessera::examples::run(argc, argv);
    // Flushes CLI11's output: the help and the version.
    TESSERA_CHECK(Error, std::cout.flush().good(), "stdout cannot be written: {}", std::strerror(errno));
    return code;
  } catch (const std::exception& error) {
    return tessera::examples::fail(error);
  }
}
