#pragma once
// Command-line options of finetune.

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
  /// Folder in Hugging Face format. If it is named tiny-llama and does not exist, it is made: a random model over
  /// bytes.
  std::string model;
  /// Files: .jsonl with "text" or "messages", prefixes of token files, and others as plain text.
  std::vector<std::string> data;
  /// Output folder for the tuned model.
  std::string out;

  /// Number of ranks that the program starts itself; ignored under a launcher.
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
  /// Number of passes per step, each over a part of the batch. Their gradients add up.
  int64_t accumulate = 1;
  /// Number of parts of a batch, as in LayoutIndependentOptions. With 0, results depend on the number of ranks.
  int64_t layout_independent = 0;
  int64_t sequence_length = 128;
  /// Puts one document in each sample, instead of packing documents one after the other.
  bool pad = false;
  /// Name of a chat template, instead of the model's own.
  std::string chat_template;
  /// Rank of adapters to train instead of the weights, or 0 to train the weights.
  int64_t lora_rank = 0;
  double lora_alpha = 16;
  /// Writes weights with the adapters added, instead of a PEFT folder.
  bool merge_lora = false;
  /// Peak; see the help for its default.
  double lr = 0;
  int64_t warmup = 10;
  double weight_decay = 0.01;
  double clip = 1;
  uint64_t seed = 1;

  MetricsTarget metrics;
  StepWatchOptions watch;

  /// Number of steps between checkpoints, or 0 to make none.
  int64_t save_every = 0;
  std::string checkpoint_dir;
  /// Also set by restarts.max_restarts.
  bool resume = false;
};

/// Returns whether a model's path is that of the tiny model.
bool is_tiny_llama(const std::string& model);

/// Parses the command line. Returns nothing if it has printed help, or an error: then the program ends with
/// `exit_code`.
std::optional<FinetuneOptions> parse_finetune_options(int argc, char** argv, int& exit_code);

/// Throws ValueError that names the first option that does not fit the others, or the number of ranks.
void check_finetune_options(const FinetuneOptions& options, int64_t world_size);

}  // namespace tessera::examples
