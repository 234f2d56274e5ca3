#include "checkpoint/checkpointer.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/file_io.h"
#include "checkpoint/io/read_tensor.h"
#include "checkpoint/io/staging.h"
#include "checkpoint/rng_state.h"
#include "checkpoint/save_job.h"
#include "comm/context/comm_observer.h"
#include "comm/context/rank_context.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";

void check_step(int64_t step) {
  TESSERA_CHECK(ValueError, step >= 0, "Checkpointer: step {}; steps count from 0", step);
}

std::string step_path(const std::string& folder, int64_t step) {
  return fmt::format("{}/{}{:08}", folder, kPrefix, step);
}

/// The digits of "step-<digits>"; empty for any other name.
std::string step_digits(const std::string& name) {
  const auto digits = name.starts_with(kPrefix) ? name.substr(std::string(kPrefix).size()) : "";
  return digits.find_first_not_of("0123456789") == std::string::npos ? digits : "";
}

/// "step-<digits>" in the folder.
struct StepFolder {
  int64_t step = 0;
  std::string path;
  // clang-tidy takes what the default compares with, a 0, for a null pointer.
  auto operator<=>(const StepFolder&) const = default;  // NOLINT(modernize-use-nullptr)
};

constexpr int64_t kAnyStep = std::numeric_limits<int64_t>::max();

/// In the order of steps; none where there is no such folder yet.
std::vector<StepFolder> step_folders(const std::string& folder) {
  std::vector<StepFolder> found;
  std::error_code error;
  const fs::directory_iterator entries(folder, error);
  // Else a run that cannot see its checkpoints would begin anew.
  TESSERA_CHECK(CheckpointError, !error || error == std::errc::no_such_file_or_directory,
                "{}: its checkpoints cannot be listed: {}", folder, error.message());
  for (const auto& entry : entries) {
    const auto digits = step_digits(entry.path().filename().string());
    if (!digits.empty() && digits.size() < 19) {
      found.push_back({.step = std::stoll(digits), .path = entry.path().string()});
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// Whole checkpoints in the folder, up to a step, oldest first.
std::vector<StepFolder> whole_checkpoints(const std::string& folder, int64_t last_step = kAnyStep) {
  auto found = step_folders(folder);
  std::erase_if(found, [&](const StepFolder& own) {
    return own.step > last_step || !fs::exists(fs::path(own.path) / kManifestName);
  });
  return found;
}

/// Rank 0: what is of a later step gets a name that no step has. The last one first: what is killed in between leaves a
/// row without a gap.
void set_aside_later(const std::string& folder, int64_t step) {
  auto later = step_folders(folder);
  std::erase_if(later, [&](const StepFolder& own) { return own.step <= step; });
  std::vector<std::string> names;
  for (auto own = later.rbegin(); own != later.rend(); ++own) {
    std::string name;
    for (int i = 0; name.empty() || fs::exists(fs::symlink_status(name)); ++i) {
      name = fmt::format("{}.aside-{}", own->path, i);
    }
    rename_durably(own->path, name);
    names.push_back(std::move(name));
  }
  if (!names.empty()) {
    TORCH_WARN(fmt::format("Checkpointer: training went on from step {}; later checkpoints are set aside, as {}", step,
                           fmt::join(names, ", ")));
  }
}

struct LatestValid {
  StepFolder folder;
  bool is_last = false;  // of all that there are
};

/// Collective.
std::optional<LatestValid> find_latest_valid(const RankSync& ranks, const std::string& folder, int64_t last_step) {
  std::istringstream steps(ranks.from_rank0([&] {
    std::string text;
    for (const auto& own : whole_checkpoints(folder, last_step)) {
      text = fmt::format("{} {} {}", own.step, fs::path(own.path).filename().string(), text);
    }
    return text;
  }));
  std::string fault;
  int64_t step = 0;
  for (std::string name; steps >> step >> name;) {
    const auto path = (fs::path(folder) / name).string();
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
  TESSERA_CHECK(CheckpointError, fault.empty(), "{}: all of its checkpoints are damaged; the last one: {}", folder,
                fault);
  return std::nullopt;
}

/// Collective.
std::optional<std::string> latest_up_to(const std::string& folder, int64_t last_step) {
  const auto path = RankSync::all().from_rank0([&] {
    const auto found = whole_checkpoints(folder, last_step);
    return found.empty() ? std::string() : found.back().path;
  });
  return path.empty() ? std::nullopt : std::optional(path);
}

/// Rank 0, before a save, which may need the room. Others' files come into being in this folder too, such as those of
/// export_safetensors.
void remove_leftovers_of_run(const std::string& folder) {
  remove_leftovers(folder, [](const std::string& name) { return !step_digits(name).empty(); });
}

/// Rank 0: removes all checkpoints but `saved` and the last `keep_last` - 1 others: what was just saved stays also
/// where its step is lower than theirs. One that goes gets another name first, so that there is never half a checkpoint
/// under its own.
void remove_old(const std::string& folder, const std::string& saved, int64_t keep_last) {
  auto others = whole_checkpoints(folder);
  const auto folder_name = [](const std::string& path) { return fs::path(path).filename(); };
  std::erase_if(others, [&](const StepFolder& own) { return folder_name(own.path) == folder_name(saved); });
  const auto keep = static_cast<size_t>(keep_last);
  std::error_code ignored;
  for (size_t i = 0; keep_last > 0 && i + keep <= others.size(); ++i) {
    const auto removed = others[i].path + kIncomplete + "removed";
    rename_durably(others[i].path, removed);
    fs::remove_all(removed, ignored);
  }
}

/// The calling thread's. A new thread begins with GPU 0, which may be another rank's; a group over NCCL takes tensors
/// of its own rank's alone.
std::optional<c10::Device> current_gpu() {
  return at::hasCUDA() ? std::optional(c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice()) : std::nullopt;
}

}  // namespace

struct Checkpointer::Impl {
  std::string folder;
  CheckpointerOptions options;
  RankSync ranks = RankSync::all();
  std::optional<RankSync> own_ranks;  // over the background thread's group
  PlanCache cache;
  at::Tensor buffer;
  std::thread thread;
  std::exception_ptr error;
  std::optional<int64_t> resumed_at;  // until the first save after it
  bool has_warned_of_later = false;

  int64_t last_step() const { return resumed_at.value_or(kAnyStep); }
  std::optional<StepFolder> latest_valid();
  /// Before the first save after resume_at(). Collective.
  void set_aside() {
    if (resumed_at) {
      ranks.on_rank0([&] { set_aside_later(folder, *resumed_at); });
      resumed_at.reset();
    }
  }
  /// The job over copies of this rank's bytes.
  PlannedSave plan(int64_t step, const State& state);
  SaveJob copied_job(const PlannedSave& planned);
  void warn_of_later(const fs::path& saved);
  void run(const RankSync& over, const SaveJob& job) {
    over.on_rank0([&] {
      remove_leftovers_of_run(folder);
      TESSERA_CHECK(CheckpointError, !fs::exists(fs::path(job.path) / kManifestName),
                    "{}: there is something already, the checkpoint of this step; if training went back to an earlier "
                    "one, call resume_at() with that one's step, which sets later ones aside",
                    job.path);
      warn_of_later(job.path);
    });
    run_save(over, job);
    over.on_rank0([&] { remove_old(folder, job.path, options.keep_last); });
  }
  void wait();
};

/// Rank 0, of a run that may have gone back.
void Checkpointer::Impl::warn_of_later(const fs::path& saved) {
  if (has_warned_of_later) {
    return;
  }
  const auto whole = whole_checkpoints(folder);
  if (whole.empty() || whole.back().step <= std::stoll(step_digits(saved.filename().string()))) {
    return;
  }
  has_warned_of_later = true;
  TORCH_WARN("Checkpointer: ", saved.string(), " is saved while there is a later one, ", whole.back().path,
             ", which latest() goes on to return; if training went back to an earlier step, call resume_at() with that "
             "step before the first save, which then sets later ones aside");
}

std::optional<StepFolder> Checkpointer::Impl::latest_valid() {
  wait();
  const auto found = find_latest_valid(ranks, folder, last_step());
  if (found && !found->is_last) {
    resumed_at = found->folder.step;
  }
  return found ? std::optional(found->folder) : std::nullopt;
}

PlannedSave Checkpointer::Impl::plan(int64_t step, const State& state) {
  auto planned = plan_save(
      ranks, state,
      {.path = step_path(folder, step), .layout = {.max_file_bytes = options.max_file_bytes}, .cache = &cache});
  check_step(step);  // which all ranks have by now, or the paths would differ
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
  const auto planned = impl_->plan(step, state);
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
  const auto planned = impl_->plan(step, state);
  SaveJob job;
  // A rank that lacks the memory says so here: the others' threads would wait for its.
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
  impl_->wait();  // a save in flight may end and remove what is found here
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
