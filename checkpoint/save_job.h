#pragma once
// A save in three steps, the last of which can run in the background. Internal to this package.
//
//   auto planned = plan_save(ranks, state, {.path = path, .cache = &cache});  // one or more collectives
//   SaveJob job = live_job(ranks, planned);                                   // or with copies of the data
//   run_save(ranks, job);                                                     // files, checksums, commit

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/progress.h"
#include "checkpoint/local_part.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/ranks/host_ranks.h"
#include "checkpoint/ranks/rank_sync.h"

namespace tessera::dcp {

struct PlanCache {  // plan of the last save, reused if all ranks' entries are the same again
  uint64_t entries_hash = 0;
  std::shared_ptr<const SavePlan> plan;
};

struct SaveRequest {  // equal on all ranks
  std::string path;
  LayoutOptions layout = {};
  PlanCache* cache = nullptr;
};

struct PlannedSave {
  std::string path;              // without trailing slashes
  std::vector<LocalPart> parts;  // this rank's shards of all tensors
  std::shared_ptr<const SavePlan> plan;
  std::map<Section, Values> values;  // of all ranks on rank 0
};

/// Validates the data to save and plans the save, before writing anything. Collective. Throws on every rank or on none,
/// like save().
PlannedSave plan_save(const RankSync& ranks, const State& state, const SaveRequest& request);

/// Block that this rank writes.
struct OwnBlock {
  size_t block = 0;  // in SavePlan::blocks
  size_t part = 0;   // in PlannedSave::parts
};
std::vector<OwnBlock> own_blocks(const PlannedSave& planned, int rank);

struct SaveJob {
  std::string path;
  bool is_single_file = false;  // writes one file `path` without a manifest, rather than a folder
  std::shared_ptr<const SavePlan> plan;
  std::vector<OwnBlock> blocks;
  std::function<at::Tensor(size_t i)> data;  // returns the data of blocks[i], contiguous on the host
  std::map<Section, Values> values;          // of all ranks on rank 0
  ProgressFn progress;
};

/// Returns a job that reads the tensors themselves, which must not change meanwhile. `planned` must outlive it.
SaveJob live_job(const RankSync& ranks, const PlannedSave& planned);

/// Removes incomplete saves and removals of the checkpoints in `folder` that `is_ours` accepts, except those of this
/// process. For rank 0. Cannot tell whether another process is still saving.
void remove_leftovers(const std::string& folder, const std::function<bool(const std::string& name)>& is_ours);

/// Writes the files, then commits them to `path` atomically. Collective. Throws on every rank or on none. With several
/// hosts, whose `path` may differ, a host's files contain the data of its ranks and of the previous host's.
void run_save(const RankSync& ranks, const HostRanks& hosts, const SaveJob& job);
void run_save(const RankSync& ranks, const SaveJob& job);  // to one folder

}  // namespace tessera::dcp
