#pragma once
// The command line of train_gpt.

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "examples/gpt_layout.h"
#include "examples/gpt_model.h"

namespace tessera::examples {

struct TrainOptions {
  /// Ranks that the program starts by itself; not used where a launcher started it.
  int nproc = 2;
  int threads = 1;
  uint64_t seed = 1;
  bool check_parity = false;
  /// What a rank's device can do at most, in the dtype in use.
  std::optional<double> peak_tflops = std::nullopt;

  GptConfig model;
  MeshShape mesh;
  LayoutOptions layout;

  /// With check_parity and no --steps: 20.
  int64_t steps = 600;
  /// Samples a step, over all ranks.
  int64_t batch = 8;
  /// The learning rate rises for `warmup` steps to `lr` and falls on a cosine to a tenth of it.
  double lr = 3e-3;
  int64_t warmup = 30;
  double weight_decay = 0.1;
  /// The gradients' norm is clipped to it; 0: it is not.
  double clip = 1.0;
  /// Steps between two validations.
  int64_t eval_every = 100;
  /// Samples that a validation looks at, in batches of `batch`.
  int64_t eval_samples = 128;

  /// Absolute paths.
  std::string data;
  std::string svg;

  /// Steps between two checkpoints; 0: none. The end of the run is saved too.
  int64_t save_every = 0;
  /// Absolute.
  std::string checkpoint_dir;
  int64_t keep_last = 3;
  bool resume = false;
  bool async_save = false;

  std::string prompt = "namespace at {\n";
  int64_t sample_bytes = 400;
  double temperature = 0.8;
};

/// The program has nothing more to do: help was printed, or an error, which is on stderr.
struct ExitNow {
  int code = 0;
};

/// Reads the command line. Relative paths are seen from where the user called (examples/train_gpt/data_path.h).
/// Throws ValueError for a device that is none, and if there is neither --data nor the default data.
std::variant<TrainOptions, ExitNow> parse_train_options(int argc, char** argv);

/// Throws ValueError that names the first option that does not fit the others or the number of ranks.
void check_train_options(const TrainOptions& options, int world_size);

}  // namespace tessera::examples
