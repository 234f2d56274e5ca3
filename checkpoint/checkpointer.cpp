#include "checkpoint/checkpointer.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/read_tensor.h"
#include "checkpoint/io/staging.h"
#include "checkpoint/ranks/host_copies.h"
#include "checkpoint/ranks/host_ranks.h"
#include "checkpoint/rng_state.h"
#include "checkpoint/run_folder.h"
#include "checkpoint/save_job.h"
#include "comm/context/comm_observer.h"
#include "comm/context/rank_context.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

void check_step(int64_t step) {
  TESSERA_CHECK(ValueError, step >= 0, "Checkpointer: step {}; steps count from 0", step);
}

/// Names the run in `folder` for its in-memory checkpoints, because a job may have several runs.
std::string run_name(const std::string& folder) {
  const auto run = fs::absolute(folder).lexically_normal().string();
  return fmt::format("run-{:016x}", hash_bytes(run.data(), run.size()));
}

struct LatestValid {
  StepFolder folder;
  bool is_last = false;  // whether it is the latest of all
};

/// Finds the checkpoint. If several folders have the step, uses the first of them. Collective.
std::optional<LatestValid> find_latest_valid(const RankSync& ranks, const std::vector<std::string>& folders,
                                             int64_t last_step) {
  std::istringstream candidates(ranks.from_rank0([&] {
    std::map<int64_t, std::string, std::greater<>> texts;
    for (size_t i = 0; i < folders.size(); ++i) {
      for (const auto& own : whole_checkpoints(folders[i], last_step)) {
        texts[own.step] += fmt::format("{} {} {} ", own.step, i, fs::path(own.path).filename().string());
      }
    }
    std::string text;
    for (const auto& [step, own] : texts) {
      text += own;
    }
    return text;
  }));
  std::string fault;
  int64_t step = 0;
  size_t folder = 0;
  for (std::string name; candidates >> step >> folder >> name;) {
    const auto path = (fs::path(folders.at(folder)) / name).string();
    try {
      ranks.on_all_ranks([&] { verify_blocks(open_checkpoint(path), ranks.rank(), ranks.size()); });
      return LatestValid{.folder = {.step = step, .path = path}, .is_last = fault.empty()};
    } catch (const CheckpointError& error) {  // on all ranks
      if (ranks.rank() == 0) {
        TORCH_WARN("Checkpointer: ", path, " is damaged, and the one before is looked at: ", error.what());
      }
      fault = fault.empty() ? error.what() : fault;
    }
  }
  TESSERA_CHECK(CheckpointError, fault.empty(), "{}: all of its checkpoints are damaged; the last one: {}",
                folders.back(), fault);
  return std::nullopt;
}

/// Returns the latest checkpoint up to a step. Collective.
std::optional<std::string> latest_up_to(const std::string& folder, int64_t last_step) {
  const auto path = RankSync::all().from_rank0([&] {
    const auto found = whole_checkpoints(folder, last_step);
    return found.empty() ? std::string() : found.back().path;
  });
  return path.empty() ? std::nullopt : std::optional(path);
}

/// Runs on rank 0, before a save in `folder` to `path`.
void make_room(const std::string& folder, const std::string& path) {
  remove_leftovers_of_run(folder);
  TESSERA_CHECK(CheckpointError, !fs::exists(fs::path(path) / kManifestName),
                "{}: there is something already, the checkpoint of this step; if training went back to an earlier "
                "one, call resume_at() with that one's step, which sets later ones aside",
                path);
}

/// Returns the calling thread's current GPU. A new thread starts with GPU 0, which may be another rank's, and a group
/// over NCCL accepts only tensors of its own rank's GPU.
std::optional<c10::Device> current_gpu() {
  return at::hasCUDA() ? std::optional(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice()) : std::nullopt;
}

}  // namespace

struct Checkpointer::Impl {
  std::string folder;
  std::string memory;  // folder of in-memory checkpoints, or ""
  CheckpointerOptions options;
  RankSync ranks = RankSync::all();
  std::optional<HostRanks> known_hosts;  // that share `memory`
  std::optional<RankSync> own_ranks;     // over the background thread's group
  PlanCache cache;
  at::Tensor buffer;
  std::thread thread;
  std::exception_ptr error;
  std::optional<int64_t> resumed_at;  // until the first save after it
  bool has_warned_of_later = false;

  int64_t last_step() const { return resumed_at.value_or(kAnyStep); }
  /// Returns the hosts that have in-memory checkpoints. Collective at the first call.
  const HostRanks& hosts() {
    if (!known_hosts) {
      known_hosts = find_hosts(ranks, options.memory_folder);
    }
    return *known_hosts;
  }
  void on_host_leaders(const std::function<void()>& step) {
    const bool leads = hosts().leads();
    ranks.on_all_ranks([&] {
      if (leads) {
        step();
      }
    });
  }
  void complete_in_memory();
  std::optional<StepFolder> latest_valid();
  /// Runs before the first save after resume_at(). Collective.
  void set_aside() {
    if (resumed_at) {
      ranks.on_rank0([&] { set_aside_later(folder, *resumed_at); });
      if (!memory.empty()) {
        on_host_leaders([&] { remove_later(memory, *resumed_at); });
      }
      resumed_at.reset();
    }
  }
  PlannedSave plan(const std::string& target, int64_t step, const State& state);
  /// Returns the job with copies of this rank's data.
  SaveJob copied_job(const PlannedSave& planned);
  void warn_of_later(const std::string& saved);
  /// Saves to the run's folder.
  void run(const RankSync& over, const SaveJob& job) {
    over.on_rank0([&] {
      make_room(folder, job.path);
      warn_of_later(job.path);
    });
    run_save(over, job);
    over.on_rank0([&] { remove_old(folder, job.path, options.keep_last); });
  }
  void wait();
};

/// Runs on rank 0, for a run that may have gone back to an earlier step.
void Checkpointer::Impl::warn_of_later(const std::string& saved) {
  if (has_warned_of_later) {
    return;
  }
  const auto whole = whole_checkpoints(folder);
  if (whole.empty() || whole.back().step <= step_of(saved)) {
    return;
  }
  has_warned_of_later = true;
  TORCH_WARN("Checkpointer: ", saved, " is saved while there is a later one, ", whole.back().path,
             ", which latest() goes on to return; if training went back to an earlier step, call resume_at() with that "
             "step before the first save, which then sets later ones aside");
}

/// Completes the latest in-memory checkpoint of several hosts on each of them, and removes those that lack data.
void Checkpointer::Impl::complete_in_memory() {
  const auto texts = ranks.exchange([&] {
    std::string steps;
    for (const auto& own : hosts().leads() ? whole_checkpoints(memory, last_step()) : std::vector<StepFolder>()) {
      steps += fmt::format("{} ", own.step);
    }
    return steps;
  });
  std::set<int64_t, std::greater<>> steps;
  for (const auto& text : texts) {
    std::istringstream fields(text);
    for (int64_t step = 0; fields >> step;) {
      steps.insert(step);
    }
  }
  for (const int64_t step : steps) {
    const auto path = step_path(memory, step);
    const auto fault = complete_on_hosts(ranks, hosts(), path);
    if (fault.empty()) {
      return;
    }
    if (ranks.rank() == 0) {
      TORCH_WARN("Checkpointer: ", path, " is given up, and the one before is looked at: ", fault);
    }
    on_host_leaders([&] { remove_later(memory, step - 1, step); });
  }
}

std::optional<StepFolder> Checkpointer::Impl::latest_valid() {
  wait();
  auto folders = std::vector{folder};
  if (!memory.empty()) {
    if (!hosts().is_one()) {
      complete_in_memory();
    }
    folders.insert(folders.begin(), memory);
  }
  const auto found = find_latest_valid(ranks, folders, last_step());
  if (found && !found->is_last) {
    resumed_at = found->folder.step;
  }
  return found ? std::optional(found->folder) : std::nullopt;
}

PlannedSave Checkpointer::Impl::plan(const std::string& target, int64_t step, const State& state) {
  auto planned = plan_save(
      ranks, state,
      {.path = step_path(target, step), .layout = {.max_file_bytes = options.max_file_bytes}, .cache = &cache});
  check_step(step);  // equal on all ranks by now, or the paths would differ
  return planned;
}

SaveJob Checkpointer::Impl::copied_job(const PlannedSave& planned) {
  RECORD_USER_SCOPE("checkpoint: copy");
  const at::NoGradGuard no_grad;
  SaveJob job = live_job(ranks, planned);
  std::vector<int64_t> bytes;
  for (const auto& own : job.blocks) {
    bytes.push_back(job.plan->block_bytes(job.plan->blocks[own.block]));
  }
  const auto offsets = staging_offsets(bytes);
  if (!buffer.defined() || buffer.numel() < offsets.back()) {
    buffer = new_staging_block(offsets.back());
  }
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < job.blocks.size(); ++i) {
    const at::Tensor source =
        block_view(planned.parts[job.blocks[i].part], job.plan->blocks[job.blocks[i].block].slice);
    copies.push_back(at::from_blob(static_cast<char*>(buffer.mutable_data_ptr()) + offsets[i], source.sizes(),
                                   source.options().device(at::kCPU)));
    copies.back().copy_(source);
  }
  job.data = [copies = std::move(copies), keep = buffer](size_t i) { return copies[i]; };
  return job;
}

Checkpointer::Checkpointer(std::string folder, CheckpointerOptions options) : impl_(std::make_unique<Impl>()) {
  TESSERA_CHECK(ValueError, !folder.empty(), "Checkpointer: the folder has no name");
  TESSERA_CHECK(ValueError, options.keep_last >= 0,
                "Checkpointer: keep_last {}; it is a number of checkpoints, or 0 for all", options.keep_last);
  impl_->folder = std::move(folder);
  impl_->memory = options.memory_folder.empty() ? "" : options.memory_folder + "/" + run_name(impl_->folder);
  impl_->options = std::move(options);
}

Checkpointer::~Checkpointer() {
  try {
    wait();
  } catch (const std::exception& error) {
    TORCH_WARN("Checkpointer: the last save failed: ", error.what());
  } catch (...) {
    TORCH_WARN("Checkpointer: the last save failed with an exception that is no std::exception");
  }
}

void Checkpointer::save(int64_t step, const State& state) {
  wait();
  const auto planned = impl_->plan(impl_->folder, step, state);
  impl_->set_aside();
  SaveJob job = live_job(impl_->ranks, planned);
  job.progress = impl_->options.progress;
  impl_->run(impl_->ranks, job);
}

void Checkpointer::async_save(int64_t step, const State& state) {
  wait();
  if (!impl_->own_ranks) {
    impl_->own_ranks = impl_->ranks.with_own_group();
  }
  const auto planned = impl_->plan(impl_->folder, step, state);
  SaveJob job;
  // A rank that runs out of memory must fail here: the other ranks' threads would wait for its thread.
  impl_->ranks.on_all_ranks([&] { job = impl_->copied_job(planned); });
  impl_->set_aside();
  job.progress = impl_->options.progress;
  impl_->thread =
      std::thread([impl = impl_.get(), context = RankContext::current(), gpu = current_gpu(), job = std::move(job)] {
        const RankContextGuard guard(context);
        const UnobservedScope unobserved;
        try {
          const c10::OptionalDeviceGuard on_gpu(gpu);
          impl->run(*impl->own_ranks, job);
        } catch (...) {
          impl->error = std::current_exception();
        }
      });
}

// May run during a save in flight, which uses another folder and a separate group.
void Checkpointer::save_in_memory(int64_t step, const State& state) {
  const HostRanks& hosts = impl_->hosts();
  const auto& memory = impl_->memory;
  auto planned = impl_->plan(run_name(impl_->folder), step, state);
  planned.path = step_path(memory, step);
  impl_->set_aside();
  impl_->on_host_leaders([&] { make_room(memory, planned.path); });
  run_save(impl_->ranks, hosts, live_job(impl_->ranks, planned));
  impl_->on_host_leaders([&] { remove_old(memory, planned.path, /*keep_last=*/1); });
}

void Checkpointer::Impl::wait() {
  if (thread.joinable()) {
    thread.join();
  }
  if (error) {
    std::rethrow_exception(std::exchange(error, nullptr));
  }
}

void Checkpointer::wait() {
  impl_->wait();
}

std::string Checkpointer::checkpoint_path(int64_t step) const {
  check_step(step);
  return step_path(impl_->folder, step);
}

std::optional<std::string> Checkpointer::latest() const {
  impl_->wait();  // a save in flight may finish and remove checkpoints that are found here
  return latest_up_to(impl_->folder, impl_->last_step());
}

std::optional<std::string> Checkpointer::latest_valid() {
  const auto found = impl_->latest_valid();
  return found ? std::optional(found->path) : std::nullopt;
}

int64_t Checkpointer::resume_or_start(ModuleRef model, torch::optim::Optimizer& optimizer, StateDict& user) {
  const auto found = impl_->latest_valid();
  if (!found) {
    return 0;
  }
  State state{.model = get_model_state_dict(model),
              .optimizer = optimizer_state_to_load(found->path, model, optimizer),
              .user = user};
  const auto rng = rng_state_to_load(found->path);
  state.user.insert(rng.begin(), rng.end());
  load(found->path, state);
  set_optimizer_state_dict(model, optimizer, state.optimizer);
  set_rng_state(rng);
  for (auto& [key, value] : user) {
    value = state.user.at(key);
  }
  return found->step;
}

void Checkpointer::resume_at(int64_t step) {
  impl_->wait();
  const auto steps = impl_->ranks.exchange([&] {
    check_step(step);
    return std::to_string(step);
  });
  for (size_t rank = 1; rank < steps.size(); ++rank) {
    TESSERA_CHECK(ValueError, steps[rank] == steps[0],
                  "Checkpointer: resume_at: rank 0 goes on from step {}, rank {} from {}; all go on from one", steps[0],
                  rank, steps[rank]);
  }
  impl_->resumed_at = step;
}

State training_state(ModuleRef model, torch::optim::Optimizer& optimizer, StateDict user) {
  State state{.model = get_model_state_dict(model),
              .optimizer = get_optimizer_state_dict(model, optimizer),
              .user = std::move(user)};
  state.user.merge(get_rng_state());
  return state;
}

std::optional<std::string> latest(const std::string& folder) {
  return latest_up_to(folder, kAnyStep);
}

}  // namespace tessera::dcp
