#pragma once
// A save in three parts, so that the last can run in the background; internal to this package.
//
//   auto plan = plan_save(ranks, state, options.layout, &cache);      // a collective or two
//   SaveJob job = ...;                                               // this rank's bytes, live or copied
//   run_save(ranks, job);                                            // files, checksums, commit

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/local_part.h"
#include "checkpoint/progress.h"
#include "checkpoint/ranks.h"
#include "checkpoint/save_plan.h"

namespace tessera::dcp {

/// What the name of a folder that is not committed, or being removed, has behind that of the checkpoint.
inline constexpr const char* kIncomplete = ".incomplete-";

/// The plan of the last save, which the next one takes if no rank's tensors changed their sizes or cuts.
struct PlanCache {
  uint64_t pieces_hash = 0;
  std::shared_ptr<const SavePlan> plan;
};

/// This rank's parts of all tensors, and who writes what of them.
struct PlannedSave {
  std::vector<LocalPart> parts;
  std::shared_ptr<const SavePlan> plan;
};

/// Collective; throws on every rank or on none.
PlannedSave plan_save(const Ranks& ranks, const State& state, const LayoutOptions& layout, PlanCache* cache = nullptr);

/// The blocks of a plan that this rank writes, and which part of its own each of them lies in.
struct OwnBlock {
  size_t block = 0;  // in SavePlan::blocks
  size_t part = 0;   // in PlannedSave::parts
};
std::vector<OwnBlock> own_blocks(const PlannedSave& planned, int rank);

struct SaveJob {
  std::string path;
  /// A single file gets the name `path`, without a manifest; else `path` is a folder.
  bool is_single_file = false;
  std::shared_ptr<const SavePlan> plan;
  std::vector<OwnBlock> blocks;
  /// The bytes of blocks[i], contiguous and in host memory.
  std::function<at::Tensor(size_t i)> data;
  std::map<Section, Values> values;
  ProgressFn progress;
};

/// From the tensors themselves: `planned` must outlive the job, and the tensors must not change while it runs.
SaveJob live_job(const Ranks& ranks, const std::string& path, const PlannedSave& planned, const State& state);

/// Collective; throws on every rank or on none. Nothing is at `path` until all of it is.
void run_save(const Ranks& ranks, const SaveJob& job);

}  // namespace tessera::dcp
