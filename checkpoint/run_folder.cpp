#include "checkpoint/run_folder.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/file_io.h"
#include "checkpoint/save_job.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";

/// Returns the digits of "step-<digits>", or "" for any other name.
std::string step_digits(const std::string& name) {
  const auto digits = name.starts_with(kPrefix) ? name.substr(std::string(kPrefix).size()) : "";
  return digits.find_first_not_of("0123456789") == std::string::npos ? digits : "";
}

/// Returns the folders in order of steps.
std::vector<StepFolder> step_folders(const std::string& folder) {
  std::vector<StepFolder> found;
  std::error_code error;
  const fs::directory_iterator entries(folder, error);
  // Otherwise a run that cannot see its checkpoints would start over.
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

/// Returns the last one first, so that an interrupted removal leaves no gap.
std::vector<StepFolder> later_folders(const std::string& folder, int64_t step) {
  auto later = step_folders(folder);
  std::erase_if(later, [&](const StepFolder& own) { return own.step <= step; });
  std::ranges::reverse(later);
  return later;
}

/// Renames it first, so that a partial checkpoint never has its name.
void remove_checkpoint(const std::string& path) {
  const auto removed = path + kIncomplete + "removed";
  rename_durably(path, removed);
  std::error_code ignored;
  fs::remove_all(removed, ignored);
}

}  // namespace

std::string step_path(const std::string& folder, int64_t step) {
  return fmt::format("{}/{}{:08}", folder, kPrefix, step);
}

int64_t step_of(const std::string& path) {
  return std::stoll(step_digits(fs::path(path).filename().string()));
}

std::vector<StepFolder> whole_checkpoints(const std::string& folder, int64_t last_step) {
  auto found = step_folders(folder);
  std::erase_if(found, [&](const StepFolder& own) {
    return own.step > last_step || !fs::exists(fs::path(own.path) / kManifestName);
  });
  return found;
}

void set_aside_later(const std::string& folder, int64_t step) {
  std::vector<std::string> names;
  for (const auto& own : later_folders(folder, step)) {
    std::string name;
    for (int i = 0; name.empty() || fs::exists(fs::symlink_status(name)); ++i) {
      name = fmt::format("{}.aside-{}", own.path, i);
    }
    rename_durably(own.path, name);
    names.push_back(std::move(name));
  }
  if (!names.empty()) {
    TORCH_WARN(fmt::format("Checkpointer: training went on from step {}; later checkpoints are set aside, as {}", step,
                           fmt::join(names, ", ")));
  }
}

void remove_later(const std::string& folder, int64_t step, int64_t last_step) {
  for (const auto& own : later_folders(folder, step)) {
    if (own.step <= last_step) {
      remove_checkpoint(own.path);
    }
  }
}

void remove_old(const std::string& folder, const std::string& saved, int64_t keep_last) {
  auto others = whole_checkpoints(folder);
  const auto folder_name = [](const std::string& path) { return fs::path(path).filename(); };
  std::erase_if(others, [&](const StepFolder& own) { return folder_name(own.path) == folder_name(saved); });
  const auto keep = static_cast<size_t>(keep_last);
  for (size_t i = 0; keep_last > 0 && i + keep <= others.size(); ++i) {
    remove_checkpoint(others[i].path);
  }
}

// Other files are written in this folder too, such as those of export_safetensors.
void remove_leftovers_of_run(const std::string& folder) {
  remove_leftovers(folder, [](const std::string& name) { return !step_digits(name).empty(); });
}

}  // namespace tessera::dcp
