#pragma once
// Distributed checkpoints: save a model, its optimizer and anything else from any layout, load it into any other.
//
//   dcp::State state{.model = dcp::get_model_state_dict(model),
//                    .optimizer = dcp::get_optimizer_state_dict(model, optimizer),
//                    .user = {{"step", step}}};
//   dcp::save("run/step-100", state);                    // every rank; each writes what it owns
//
//   dcp::State state{.model = dcp::get_model_state_dict(model),       // another model, world size, mesh, placements
//                    .optimizer = dcp::optimizer_state_to_load("run/step-100", model, optimizer),
//                    .user = {{"step", int64_t{0}}}};
//   dcp::load("run/step-100", state);                    // writes into the tensors
//   dcp::set_optimizer_state_dict(model, optimizer, state.optimizer);
//
// `run/step-100` is then a folder that any tool for Hugging Face folders reads:
//
//   model-00001-of-00002.safetensors ...      the model's tensors, whole, under their own names
//   model.safetensors.index.json              which file has which
//   optimizer-00001-of-00001.safetensors      optimizer.state.<parameter>.exp_avg ...
//   user-00001-of-00001.safetensors           tensors among the user's state
//   tessera.json                              checksums and values; written last (manifest.h)
//
// The .safetensors files are the same, byte by byte, from every layout of the ranks (save_plan.h), for the same
// max_file_bytes; tessera.json is not: it has the checksum of each part that a rank wrote. They need a file system that
// all ranks see and that takes writes of several ranks to one file, as local disks, Lustre, GPFS and NFS do.
//
// Safe: files come into being in `run/step-100.incomplete-<n>`, are synced to the disk, and get their name by one
// rename when all of them are whole; a rank that is killed at any moment leaves earlier checkpoints as they were, and a
// folder that the next save of this name removes. load() verifies every byte that it reads against its checksum, and
// touches no tensor before all ranks have read and verified all of theirs. What may fail then is a copy into a tensor
// of the state: one that refuses to be written to, or whose device has no memory left. The state's tensors are partly
// the loaded ones after that, on all ranks, and its values, such as the step, as they were: load again, or another.
//
// RankSync wait for each other as in any collective: one must not read or write longer than another by more than the
// `timeout` of init_process_group, on pain of CommError. Rank 0 syncs all files, and alone writes what it alone has.
//
// Errors are raised on every rank or on none: CheckpointError (files), KeyError (missing and unexpected keys),
// ValueError (sizes, dtypes, ranks that disagree), Error (what libtorch throws: no memory). They name file and key.
//
// After torch.distributed.checkpoint, whose Hugging Face reader reads these folders, and whose Hugging Face writer's
// folders load() reads. Thread safety: one save or load of a rank at a time.

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/progress.h"
#include "checkpoint/format/state.h"
#include "checkpoint/state_dict.h"

namespace tessera::dcp {

struct SaveOptions {
  /// A file gets no further tensor that would make it longer than this; 5 GiB. The same on all ranks.
  int64_t max_file_bytes = int64_t{5} << 30;
  /// Called after each block of a few MB, in the thread that writes; empty: not.
  ProgressFn progress = {};
};

/// Makes the folder `path`. Collective. Throws CheckpointError if there is something else than an empty folder, or the
/// disk refuses; and before anything is written, ValueError if ranks disagree about the path, a tensor's sizes or dtype
/// or a value (all NaNs are one), if parts of a tensor are missing, or the memory of one was freed, or a text is not
/// UTF-8; StateError for a DTensor's view that is a copy from before a write.
void save(const std::string& path, const State& state, const SaveOptions& options = {});

struct LoadOptions {
  /// true: every key of the state must be in the checkpoint; and where the state of any rank has a model or optimizer
  /// section, the checkpoint has no keys in it that no rank asks for. false: loads the keys that both have. The same on
  /// all ranks.
  bool strict = true;
  /// Which weights of a Hugging Face folder that has several: "fp16" for model.fp16.safetensors, or the index
  /// model.safetensors.index.fp16.json. Without it files of variants are not looked at. The same on all ranks.
  std::string variant = {};
  /// Called once for each tensor, when it was read and verified, in the thread that loads; empty: not.
  ProgressFn progress = {};
};

/// Keys with their section, as messages have them: "in.weight", "optimizer.state.in.weight.exp_avg".
struct LoadResult {
  std::vector<std::string> missing_keys;     // of this rank's state, that the checkpoint lacks
  std::vector<std::string> unexpected_keys;  // of the checkpoint's model and optimizer, that no rank's state has
};

/// Fills `state` from `path`: a folder that save() or a Hugging Face tool wrote, or one safetensors file. Where a
/// folder of other tools has an index, that says which file each tensor comes from, and what else the files have is
/// ignored; else a tensor that two files have is an error, unless they are its parts. Tensors are written in place;
/// floating ones are cast. An undefined tensor becomes a plain one of the checkpoint's sizes and dtype on the CPU.
/// Values are replaced by those of the checkpoint, which must have the same type. A section that is empty in the state
/// is not loaded. Collective; ranks may ask for different keys. Needs host memory for this rank's part of all tensors.
/// A write is counted, so that backward through a graph that saved the tensor is autograd's error. Throws
/// NotImplementedError for a DTensor's view that had to be a copy, CheckpointError also for a tensor whose stored dtype
/// this library does not know, and for a value that has another type in the checkpoint, or is a tensor there, or the
/// reverse.
LoadResult load(const std::string& path, State& state, const LoadOptions& options = {});

/// One safetensors file of a whole model, written by all ranks, each its own part: nobody ever holds the model. A rank
/// may have no tensor, as all but rank 0 of a whole state dict on the CPU (state_dict.h). An old file of this name is
/// replaced when the new one is whole. load(file, state) is the way back. Collective. Throws ValueError if the model
/// has values, or no rank a tensor.
void export_safetensors(const std::string& file, const StateDict& model, const SaveOptions& options = {});

}  // namespace tessera::dcp
