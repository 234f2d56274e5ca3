#pragma once
// Checkpoints of a run in a folder, named by step: step-00000100 and so on. For rank 0. Internal to this package.

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace tessera::dcp {

std::string step_path(const std::string& folder, int64_t step);
int64_t step_of(const std::string& path);  // the inverse

/// Entry "step-<digits>" of the folder.
struct StepFolder {
  int64_t step = 0;
  std::string path;
  // clang-tidy mistakes the 0 that the default compares with for a null pointer.
  auto operator<=>(const StepFolder&) const = default;  // NOLINT(modernize-use-nullptr)
};

constexpr int64_t kAnyStep = std::numeric_limits<int64_t>::max();

/// Returns the complete checkpoints up to a step, oldest first; none if the folder does not exist. Throws
/// CheckpointError if the folder cannot be listed.
std::vector<StepFolder> whole_checkpoints(const std::string& folder, int64_t last_step = kAnyStep);

/// Renames the entries of later steps so that they no longer match a step, and logs a warning.
void set_aside_later(const std::string& folder, int64_t step);
/// Removes the entries of later steps, up to `last_step`.
void remove_later(const std::string& folder, int64_t step, int64_t last_step = kAnyStep);

/// Removes all checkpoints except `saved` and the `keep_last` - 1 latest others; does nothing if `keep_last` is 0.
/// `saved` stays even if its step is lower than theirs.
void remove_old(const std::string& folder, const std::string& saved, int64_t keep_last);

/// Removes remains of interrupted saves and removals. Call it before a save, which may need the space.
void remove_leftovers_of_run(const std::string& folder);

}  // namespace tessera::dcp
