#pragma once
// The command line of finetune.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "activation_checkpoint/checkpoint_options.h"
#include "examples/training/restart_options.h"
#include "examples/training/step_watch.h"
#include "examples/training/training_log.h"

namespace tessera::examples {

struct FinetuneOptions {
  /// Folder of Hugging Face. One called tiny-llama is made if there is none: a random model over bytes.
  std::string model;
  /// Files: .jsonl with "text" or "messages", prefixes of token files, and others as plain text.
  std::vector<std::string> data;
  /// Folder that the tuned model is written to.
  std::string out;

  /// Ranks that the program starts itself; ignored under a launcher.
  int nproc = 2;
  RestartOptions restarts;
  int threads = 1;
  int64_t tp = 1;
  bool sequence_parallel = false;
  Recompute recompute = Recompute::None;
  bool bf16 = false;

  int64_t steps = 100;
  /// Samples per step, over all ranks.
  int64_t batch = 8;
  /// Passes per step, each over a part of the batch, whose gradients add up.
  int64_t accumulate = 1;
  /// Parts of a batch, as in LayoutIndependentOptions; 0: results depend on the number of ranks.
  int64_t layout_independent = 0;
  int64_t sequence_length = 128;
  /// A document a sample, rather than documents packed one after the other.
  bool pad = false;
  /// Name of a chat template, in place of the model's own.
  std::string chat_template;
  /// Trains adapters of this rank in place of the weights; 0: the weights.
  int64_t lora_rank = 0;
  double lora_alpha = 16;
  /// Writes weights with the adapters added, rather than a folder of PEFT.
  bool merge_lora = false;
  /// Peak; see the help for its default.
  double lr = 0;
  int64_t warmup = 10;
  double weight_decay = 0.01;
  double clip = 1;
  uint64_t seed = 1;

  MetricsTarget metrics;
  StepWatchOptions watch;

  /// Steps between checkpoints; 0: none.
  int64_t save_every = 0;
  std::string checkpoint_dir;
  /// Also set by restarts.max_restarts.
  bool resume = false;
};

/// Returns whether a model's path is that of the tiny one.
bool is_tiny_llama(const std::string& model);

/// Parses the command line. Returns nothing if it has printed help, or an error: then the program ends with
/// `exit_code`.
std::optional<FinetuneOptions> parse_finetune_options(int argc, char** argv, int& exit_code);

/// Throws ValueError that names the first option that does not fit the others, or the number of ranks.
void check_finetune_options(const FinetuneOptions& options, int64_t world_size);

}  // namespace tessera::examples
