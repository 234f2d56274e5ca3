#include "checkpoint/checkpointer.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <optional>
#include <thread>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/file_io.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save_job.h"
#include "checkpoint/staging.h"
#include "comm/comm_observer.h"
#include "comm/rank_context.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";

void check_step(int64_t step) {
  TESSERA_CHECK(ValueError, step >= 0, "Checkpointer: step {}; steps count from 0", step);
}

std::string path_of_step(const std::string& folder, int64_t step) {
  return fmt::format("{}/{}{:08}", folder, kPrefix, step);
}

/// The digits of "step-<digits>"; empty for any other name.
std::string step_digits(const std::string& name) {
  const auto digits = name.starts_with(kPrefix) ? name.substr(std::string(kPrefix).size()) : "";
  return digits.find_first_not_of("0123456789") == std::string::npos ? digits : "";
}

/// Whole checkpoints in the folder, oldest first; none where there is no such folder yet.
std::vector<std::string> whole_checkpoints(const std::string& folder) {
  std::vector<std::pair<uint64_t, std::string>> found;
  std::error_code error;
  const fs::directory_iterator entries(folder, error);
  // Else a run that cannot see its checkpoints would begin anew.
  TESSERA_CHECK(CheckpointError, !error || error == std::errc::no_such_file_or_directory,
                "{}: its checkpoints cannot be listed: {}", folder, error.message());
  for (const auto& entry : entries) {
    const auto digits = step_digits(entry.path().filename().string());
    if (!digits.empty() && digits.size() < 19 && fs::exists(entry.path() / kManifestName)) {
      found.emplace_back(std::stoull(digits), entry.path().string());
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> paths;
  paths.reserve(found.size());
  for (auto& [step, path] : found) {
    paths.push_back(std::move(path));
  }
  return paths;
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
  const auto name_of = [](const std::string& path) { return fs::path(path).filename(); };
  std::erase_if(others, [&](const std::string& path) { return name_of(path) == name_of(saved); });
  const auto keep = static_cast<size_t>(keep_last);
  std::error_code ignored;
  for (size_t i = 0; keep_last > 0 && i + keep <= others.size(); ++i) {
    const auto removed = others[i] + kIncomplete + "removed";
    rename_durably(others[i], removed);
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
  Ranks ranks = Ranks::all();
  std::optional<Ranks> own_ranks;  // over the background thread's group
  PlanCache cache;
  at::Tensor buffer;
  std::thread thread;
  std::exception_ptr error;

  /// The job over copies of this rank's bytes.
  PlannedSave plan(int64_t step, const State& state);
  SaveJob copied_job(const PlannedSave& planned);
  void run(const Ranks& over, const SaveJob& job) const {
    over.on_first([&] { remove_leftovers_of_run(folder); });
    run_save(over, job);
    over.on_first([&] { remove_old(folder, job.path, options.keep_last); });
  }
  void wait();
};

PlannedSave Checkpointer::Impl::plan(int64_t step, const State& state) {
  auto planned = plan_save(
      ranks, state,
      {.path = path_of_step(folder, step), .layout = {.max_file_bytes = options.max_file_bytes}, .cache = &cache});
  check_step(step);  // which all ranks have by now, or the paths would differ
  return planned;
}

SaveJob Checkpointer::Impl::copied_job(const PlannedSave& planned) {
  const at::NoGradGuard no_grad;
  SaveJob job = live_job(ranks, planned);
  std::vector<int64_t> bytes;
  for (const auto& own : job.blocks) {
    bytes.push_back(job.plan->bytes_of(job.plan->blocks[own.block]));
  }
  const auto offsets = staging_offsets(bytes);
  if (!buffer.defined() || buffer.numel() < offsets.back()) {
    buffer = new_staging_block(offsets.back());
  }
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < job.blocks.size(); ++i) {
    const at::Tensor source = block_view(planned.parts[job.blocks[i].part], job.plan->blocks[job.blocks[i].block].box);
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
  impl_->ranks.together([&] { job = impl_->copied_job(planned); });
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

std::string Checkpointer::path_of(int64_t step) const {
  check_step(step);
  return path_of_step(impl_->folder, step);
}

std::optional<std::string> Checkpointer::latest() const {
  impl_->wait();  // a save in flight may end and remove what is found here
  return dcp::latest(impl_->folder);
}

std::optional<std::string> latest(const std::string& folder) {
  const auto path = Ranks::all().from_first([&] {
    const auto paths = whole_checkpoints(folder);
    return paths.empty() ? std::string() : paths.back();
  });
  return path.empty() ? std::nullopt : std::optional(path);
}

}  // namespace tessera::dcp
