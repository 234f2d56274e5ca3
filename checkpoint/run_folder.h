#pragma once
// The checkpoints of a run in a folder, by step: step-00000100 and so on. For rank 0. Internal to this package.

#include <compare>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace tessera::dcp {

std::string step_path(const std::string& folder, int64_t step);
int64_t step_of(const std::string& path);  // the reverse

/// "step-<digits>" in the folder.
struct StepFolder {
  int64_t step = 0;
  std::string path;
  // clang-tidy takes what the default compares with, a 0, for a null pointer.
  auto operator<=>(const StepFolder&) const = default;  // NOLINT(modernize-use-nullptr)
};

constexpr int64_t kAnyStep = std::numeric_limits<int64_t>::max();

/// Returns the whole checkpoints up to a step, oldest first; none where there is no such folder yet. Throws
/// CheckpointError if the folder cannot be listed.
std::vector<StepFolder> whole_checkpoints(const std::string& folder, int64_t last_step = kAnyStep);

/// Gives what is of a later step a name that no step has, and warns of it.
void set_aside_later(const std::string& folder, int64_t step);
void remove_later(const std::string& folder, int64_t step);  // removes it instead

/// Removes all checkpoints but `saved` and the last `keep_last` - 1 others, if `keep_last` is not 0: what was just
/// saved stays also where its step is lower than theirs.
void remove_old(const std::string& folder, const std::string& saved, int64_t keep_last);

/// Removes what killed saves and removals have left. To be called before a save, which may need the room.
void remove_leftovers_of_run(const std::string& folder);

}  // namespace tessera::dcp
