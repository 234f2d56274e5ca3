#pragma once
// A save in three parts, so that the last can run in the background; internal to this package.
//
//   auto planned = plan_save(ranks, state, {.path = path, .cache = &cache});     // a collective or two
//   SaveJob job = ...;                                                          // this rank's bytes, live or copied
//   run_save(ranks, job);                                                       // files, checksums, commit

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/progress.h"
#include "checkpoint/local_part.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/rank_sync.h"

namespace tessera::dcp {

/// What the name of a folder that is not committed, or being removed, has behind that of the checkpoint.
inline constexpr const char* kIncomplete = ".incomplete-";

/// The plan of the last save, which the next one takes if no rank's tensors changed their sizes or cuts.
struct PlanCache {
  uint64_t pieces_hash = 0;
  std::shared_ptr<const SavePlan> plan;
};

/// What ranks are to save alike.
struct SaveRequest {
  std::string path;
  LayoutOptions layout = {};
  PlanCache* cache = nullptr;
};

/// This rank's parts of all tensors, who writes what of them, and what there is beside tensors.
struct PlannedSave {
  std::string path;  // without slashes at its end
  std::vector<LocalPart> parts;
  std::shared_ptr<const SavePlan> plan;
  std::map<Section, Values> values;  // on rank 0 of all ranks
};

/// Finds all that is wrong with what ranks want to save, before anything is written. Collective; throws on every rank
/// or on none: ValueError where ranks have other paths, file sizes, tensors or values, or texts that are not UTF-8.
PlannedSave plan_save(const RankSync& ranks, const State& state, const SaveRequest& request);

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
  std::map<Section, Values> values;  // on rank 0 of all ranks
  ProgressFn progress;
};

/// From the tensors themselves: `planned` must outlive the job, and the tensors must not change while it runs.
SaveJob live_job(const RankSync& ranks, const PlannedSave& planned);

/// Rank 0: removes what killed saves and removals of the checkpoints in `folder` that `is_ours` left there. Saves of
/// this process, which may be in flight, stay; those of another process that lives are not told from killed ones.
void remove_leftovers(const std::string& folder, const std::function<bool(const std::string& name)>& is_ours);

/// Collective; throws on every rank or on none. Nothing is at `path` until all of it is.
void run_save(const RankSync& ranks, const SaveJob& job);

}  // namespace tessera::dcp
