#pragma once
// The command line of train_gpt.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "examples/gpt_layout.h"
#include "examples/gpt_model.h"
#include "examples/training/restart_options.h"
#include "examples/training/step_watch.h"
#include "examples/training/training_log.h"

namespace tessera::examples {

struct TrainOptions {
  /// Ranks that the program starts itself; ignored under a launcher.
  int nproc = 2;
  RestartOptions restarts;
  int threads = 1;
  uint64_t seed = 1;
  bool check_parity = false;
  /// Maximum rate of a rank's device in the dtype in use.
  std::optional<double> peak_tflops = std::nullopt;

  GptConfig model;
  MeshShape mesh;
  LayoutOptions layout;

  /// With check_parity and without --steps: 20.
  int64_t steps = 600;
  /// Samples per step, over all ranks.
  int64_t batch = 8;
  /// Passes of forward and backward per step, each over an equal part of a rank's samples.
  int64_t accumulate = 1;
  /// Parts of a batch, as in LayoutIndependentOptions; 0: each rank has one, and results depend on their number.
  int64_t layout_independent = 0;
  /// Runs a step as one CUDA graph.
  bool captured = false;
  /// Peak learning rate: it rises for `warmup` steps to `lr` and falls on a cosine to a tenth of it.
  double lr = 3e-3;
  int64_t warmup = 30;
  double weight_decay = 0.1;
  /// Maximum norm of the gradients; 0 does not clip.
  double clip = 1.0;
  /// Steps between validations.
  int64_t eval_every = 100;
  /// Samples per validation, in batches of `batch`.
  int64_t eval_samples = 128;

  /// Absolute paths.
  std::string data;
  std::string svg;
  MetricsTarget metrics;
  StepWatchOptions watch;

  /// Number of steps between checkpoints, or 0 to make none. The end of the run is saved too.
  int64_t save_every = 0;
  /// Absolute path.
  std::string checkpoint_dir;
  int64_t keep_last = 3;
  /// Also set by restarts.max_restarts.
  bool resume = false;
  bool async_save = false;

  std::string prompt = "namespace at {\n";
  int64_t sample_bytes = 400;
  double temperature = 0.8;
};

/// Result if the program has nothing more to do: it has printed help, or an error on stderr.
struct ExitNow {
  int code = 0;
};

/// Parses the command line. Relative paths are the user's (examples/training/data_path.h). Throws ValueError for an
/// unknown device, and without --data if there is no default data.
std::variant<TrainOptions, ExitNow> parse_train_options(int argc, char** argv);

/// Throws ValueError, naming the first option that does not fit the others or the number of ranks.
void check_train_options(const TrainOptions& options, int world_size);

}  // namespace tessera::examples
