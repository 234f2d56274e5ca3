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
// A save is atomic: the folder gets its name when all files are whole, so a rank killed at any moment leaves earlier
// checkpoints as they were. load() verifies every byte against its checksum before it touches a tensor.
// docs/semantics.md has the details, and what is asked of file systems.
//
// Errors are raised on every rank or on none, and name file and key:
// - CheckpointError: files.
// - KeyError: missing and unexpected keys.
// - ValueError: sizes, dtypes, ranks that disagree.
// - CommError: a rank that took longer than another by the time-out of init_process_group.
// - Error: what libtorch throws (out of memory).
//
// Thread safety: one save or load of a rank at a time.
// Source: torch.distributed.checkpoint, whose Hugging Face reader and writer use the same folders.

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

/// Writes `state` to the new folder `path`. Collective. Throws, before anything is written:
/// - ValueError if ranks disagree about the path, a value, or a tensor's sizes or dtype; parts of a tensor are missing;
///   its memory was freed; or a text is not UTF-8.
/// - StateError for a DTensor's view that is a copy from before a write.
/// Throws CheckpointError if `path` is anything but an empty folder, or the disk refuses.
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

/// Fills `state` from `path`: a folder that save() or a Hugging Face tool wrote, or one safetensors file. Collective.
/// - Tensors are written in place; floating ones are cast. An undefined one becomes a plain CPU tensor.
/// - Values are replaced by those of the checkpoint, which have the same type.
/// - A section that is empty in the state is not loaded. Ranks may ask for different keys.
/// Needs host memory for this rank's part of all tensors. Throws NotImplementedError for a DTensor's view that had to
/// be a copy, and CheckpointError for an unknown stored dtype or a value of another type.
LoadResult load(const std::string& path, State& state, const LoadOptions& options = {});

/// Writes one safetensors file of a whole model; each rank writes its own part, so no rank holds the model. Collective.
/// An old file of this name is replaced once the new one is whole. Throws ValueError if the model has values, or no
/// rank has a tensor.
void export_safetensors(const std::string& file, const StateDict& model, const SaveOptions& options = {});

}  // namespace tessera::dcp
