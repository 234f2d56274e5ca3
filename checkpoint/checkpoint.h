#pragma once
// Distributed checkpoints: save a model, its optimizer and other state, and load them under any other layout.
//
//   dcp::State state{.model = dcp::get_model_state_dict(model),
//                    .optimizer = dcp::get_optimizer_state_dict(model, optimizer), .user = {{"step", step}}};
//   dcp::save("run/step-100", state);  // on every rank; each writes the data that it owns
//
// A save is atomic. docs/semantics.md shows how to resume, and describes the files, which Hugging Face tools can read.
// Errors are thrown on every rank or on none, and name the file and key:
// - CheckpointError: a file cannot be read or written, or is damaged.
// - KeyError: keys are missing or unexpected.
// - ValueError: sizes or dtypes do not fit, or ranks disagree.
// - CommError: a rank is late by more than the timeout of init_process_group.
// - Error: libtorch fails, for example out of memory.
// Thread safety: one save or load per rank at a time. Source: torch.distributed.checkpoint.

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/progress.h"
#include "checkpoint/format/state.h"
#include "checkpoint/state_dict.h"

namespace tessera::dcp {

struct SaveOptions {
  int64_t max_file_bytes = int64_t{5} << 30;  // largest size of a file with several tensors, equal on all ranks
  ProgressFn progress = {};                   // called by the writing thread after each block of at most 4 MiB
};

/// Writes `state` to `path`, a new or empty folder. Collective. Throws ValueError, StateError or NotImplementedError
/// for tensors that cannot be saved (docs/semantics.md), before it writes anything.
void save(const std::string& path, const State& state, const SaveOptions& options = {});

struct LoadOptions {
  bool strict = true;        // require the same keys on both sides; equal on all ranks
  std::string variant = {};  // of Hugging Face weights, equal on all ranks: "fp16" for model.fp16.safetensors
  ProgressFn progress = {};  // called by the loading thread after each tensor
};

/// Keys with their section, as in messages: "in.weight", "optimizer.state.in.weight.exp_avg".
struct LoadResult {
  std::vector<std::string> missing_keys;     // of this rank's state, absent from the checkpoint
  std::vector<std::string> unexpected_keys;  // of the checkpoint's model and optimizer, requested by no rank
};

/// Fills `state` from a folder of save() or a Hugging Face tool, or from one safetensors file. Collective. Tensors are
/// written in place, floating ones cast, and undefined ones become plain CPU tensors. Empty sections are skipped; ranks
/// may request different keys. Needs host memory for this rank's shards. Throws NotImplementedError for a DTensor's
/// view that is a copy, and CheckpointError for an unknown stored dtype or a value of another type.
LoadResult load(const std::string& path, State& state, const LoadOptions& options = {});

/// Writes a model to one safetensors file, replacing an old one once complete. Collective. No rank holds the whole
/// model. Throws ValueError if the model has values, or if no rank has a tensor.
void export_safetensors(const std::string& file, const StateDict& model, const SaveOptions& options = {});

}  // namespace tessera::dcp
