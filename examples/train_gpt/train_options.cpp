#include "examples/train_gpt/train_options.h"

#include <CLI/CLI.hpp>
#include <cmath>

#include "base/error.h"
#include "base/version.h"
#include "comm/local_launcher.h"
#include "examples/train_gpt/train_device.h"
#include "examples/training/data_path.h"
#include "examples/training/layout_independent_option.h"
#include "examples/training/recompute_option.h"
#include "examples/training/training_log.h"

namespace tessera::examples {

namespace {

constexpr const char* kDescription =
    "Trains a small GPT on the bytes of a text, sharded over several processes with tessera::fully_shard,\n"
    "then writes the loss curve, the validation loss and a text of the model's own.\n"
    "Started by torchrun, mpirun or srun it uses their ranks; otherwise it starts --nproc processes itself.";

constexpr const char* kExamples =
    "Examples:\n"
    "  ./bazelw run //examples:train_gpt\n"
    "  ./bazelw run //examples:train_gpt -- --data book.txt --steps 2000 --prompt 'Once upon'\n"
    "  ./bazelw run //examples:train_gpt -- --check-parity --steps 20\n"
    "  ./bazelw run //examples:train_gpt -- --nproc 4 --tp 2 --sp --checkpoint-activations\n"
    "  ./bazelw run --config=cuda //examples:train_gpt -- --device cuda --bf16 --peak-tflops 989\n"
    "  mpirun -n 2 bazel-bin/examples/train_gpt --dim 256 --layers 6 --heads 8";

/// Rejects negative numbers, because CLI11 reads -1 as the largest unsigned number.
std::string check_not_negative(const std::string& text) {
  return text.starts_with('-') ? text + ": must not be negative" : std::string();
}

void add_model_options(CLI::App& app, TrainOptions& options) {
  const char* group = "Model";
  app.add_option("--dim", options.model.dim, "width of the residual stream")->group(group);
  app.add_option("--layers", options.model.layers, "transformer blocks, each a unit of fully_shard")->group(group);
  app.add_option("--heads", options.model.heads, "attention heads; divides --dim")->group(group);
  app.add_option("--context", options.model.context, "bytes that the model looks at")->group(group);
}

void add_layout_options(CLI::App& app, TrainOptions& options) {
  const char* group = "Layout";
  app.add_option("--dp", options.mesh.dp, "ranks that parameters and data are cut over; 0: all that are left")
      ->group(group);
  app.add_option("--tp", options.mesh.tp, "ranks that each matrix is cut over; they see the same data; divides --heads")
      ->group(group);
  app.add_option("--replicate", options.mesh.replicate, "copies of all that, each with data of its own")->group(group);
  app.add_flag("--sp", options.layout.sequence_parallel,
               "with --tp: cut the activations between the matrices along the sequence")
      ->group(group);
  add_recompute_option(app, "--checkpoint-activations", options.layout.recompute, group);
  app.add_flag("--meta-init", options.layout.meta_init,
               "build the model without memory and give each rank only its parts, with the same values")
      ->group(group);
  app.add_flag("--bf16", options.layout.bf16,
               "gather and compute in bfloat16; shards, gradient reduction and optimizer stay float32")
      ->group(group);
}

void add_training_options(CLI::App& app, TrainOptions& options) {
  const char* group = "Training";
  app.add_option("--steps", options.steps, "optimizer steps")->group(group);
  app.add_option("--batch", options.batch, "samples a step over all ranks; a multiple of --dp x --replicate")
      ->group(group);
  app.add_option("--accumulate", options.accumulate,
                 "passes per step, each over a part of the batch: less memory, and gradients are reduced once")
      ->group(group);
  add_layout_independent_option(app, options.layout_independent, group);
  app.add_flag("--captured", options.captured, "run each step as one CUDA graph; needs --device cuda and one process")
      ->group(group);
  app.add_option("--lr", options.lr, "peak learning rate of AdamW; ends at a tenth, on a cosine")->group(group);
  app.add_option("--warmup", options.warmup, "steps in which the learning rate rises")->group(group);
  app.add_option("--weight-decay", options.weight_decay, "of matrices; vectors are not decayed")->group(group);
  app.add_option("--clip", options.clip, "largest norm of all gradients together; 0: any")->group(group);
  app.add_option("--seed", options.seed, "of initial values, samples and text")
      ->group(group)
      ->check(check_not_negative);
  app.add_option("--eval-every", options.eval_every, "steps between two validations")->group(group);
  app.add_option("--eval-samples", options.eval_samples, "samples a validation; a multiple of --batch")->group(group);
}

void add_text_options(CLI::App& app, TrainOptions& options) {
  const char* group = "Input and output";
  app.add_option("--data", options.data,
                 "text to train on; a tenth of it is for validation\n(default: C++ headers of libtorch)")
      ->group(group)
      ->type_name("FILE");
  app.add_option("--svg", options.svg, "where the loss curve goes (default: loss_curve.svg)")
      ->group(group)
      ->type_name("FILE");
  add_log_options(app, options.metrics, group);
  add_watch_options(app, options.watch, group);
  app.add_option("--prompt", options.prompt, "what the model's text goes on from")->group(group)->default_str("");
  app.add_option("--sample-bytes", options.sample_bytes, "length of the model's text; 0: none")->group(group);
  app.add_option("--temperature", options.temperature, "of the model's text: low is dull, high is wild")->group(group);
}

void add_checkpoint_options(CLI::App& app, TrainOptions& options) {
  const char* group = "Checkpoints";
  app.add_option("--save-every", options.save_every,
                 "steps between two checkpoints; 0: none. Ctrl-C\nand SIGTERM end the run with one; twice, at once")
      ->group(group);
  app.add_option("--checkpoint-dir", options.checkpoint_dir, "where they go (default: checkpoints)")
      ->group(group)
      ->type_name("FOLDER");
  app.add_option("--keep-last", options.keep_last, "checkpoints that are kept; 0: all")->group(group);
  app.add_flag("--resume", options.resume,
               "go on from the latest checkpoint that is not damaged, on any number of ranks; from the\n"
               "start if there is none. On as many ranks the run ends bit by bit as if it had never stopped")
      ->group(group);
  app.add_flag("--async-save", options.async_save, "write checkpoints while training goes on")->group(group);
}

void add_process_options(CLI::App& app, TrainOptions& options) {
  const char* group = "Processes";
  app.add_option("--nproc", options.nproc, "processes to start; not used under torchrun, mpirun or srun")->group(group);
  add_restart_options(app, options.restarts, group);
  app.add_option("--threads", options.threads, "threads a process computes with")->group(group);
  app.add_option_function<std::string>(
         "--device", [&](const std::string& name) { options.layout.device = parse_device(name); },
         "cpu, or cuda: each process takes a GPU (builds with --config=cuda)")
      ->group(group)
      ->type_name("cpu|cuda")
      ->default_str("cpu");
  app.add_option("--peak-tflops", options.peak_tflops,
                 "what a process's device can do at most, in TFLOP/s, in the dtype in use, as its\n"
                 "vendor publishes it (H100 SXM, dense bfloat16: 989): shows the share of it that\n"
                 "training reaches, MFU")
      ->group(group);
  app.add_flag("--check-parity", options.check_parity,
               "then train again in one process and show the largest difference of losses and\n"
               "parameters: fails if they differ by more than rounding. Takes 20 steps unless\n"
               "--steps is given; with --clip 0, no --accumulate and 2, 4, 8, ... ranks both are equal.\n"
               "The one process runs a plain model, with --bf16 one that casts in the same places")
      ->group(group);
}

void check_positive(const char* name, int64_t value) {
  TESSERA_CHECK(ValueError, value > 0, "{} {}: must be at least 1", name, value);
}

}  // namespace

std::variant<TrainOptions, ExitNow> parse_train_options(int argc, char** argv) {
  TrainOptions options;
  CLI::App app(kDescription, "train_gpt");
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(36);
  app.footer(kExamples);
  app.set_version_flag("--version", std::string("train_gpt of Tessera ") + kVersion);
  add_process_options(app, options);
  add_text_options(app, options);
  add_training_options(app, options);
  add_model_options(app, options);
  add_layout_options(app, options);
  add_checkpoint_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return ExitNow{app.exit(error) == 0 ? 0 : kUserErrorExitCode};
  }
  options.resume = options.resume || options.restarts.max_restarts > 0;
  if (options.check_parity && app.count("--steps") == 0) {
    options.steps = 20;
  }
  options.data = options.data.empty() ? default_data_path() : path_from_caller(options.data);
  options.svg = path_from_caller(options.svg.empty() ? "loss_curve.svg" : options.svg);
  resolve_folder(options.metrics);
  resolve_folders(options.watch);
  options.checkpoint_dir = path_from_caller(options.checkpoint_dir.empty() ? "checkpoints" : options.checkpoint_dir);
  return options;
}

void check_train_options(const TrainOptions& options, int world_size) {
  check_positive("--nproc", options.nproc);
  check_restart_options(options.restarts, options.nproc, {.save_every = options.save_every, .resume = options.resume});
  check_positive("--threads", options.threads);
  TESSERA_CHECK(ValueError, !options.peak_tflops || (*options.peak_tflops > 0 && std::isfinite(*options.peak_tflops)),
                "--peak-tflops {}: must be above 0, the TFLOP/s that the vendor publishes for a process's device",
                *options.peak_tflops);
  check_positive("--dim", options.model.dim);
  check_positive("--layers", options.model.layers);
  check_positive("--heads", options.model.heads);
  check_positive("--context", options.model.context);
  check_positive("--steps", options.steps);
  check_positive("--batch", options.batch);
  check_positive("--eval-every", options.eval_every);
  check_positive("--eval-samples", options.eval_samples);
  check_positive("--log-every", options.metrics.every);
  check_watch_options(options.watch, options.steps);
  TESSERA_CHECK(ValueError, options.model.dim % options.model.heads == 0,
                "--heads {}: must divide --dim {}, since each head gets an equal part of it", options.model.heads,
                options.model.dim);
  const MeshShape mesh = checked_shape(options.mesh, world_size);
  const int64_t slices = mesh.dp * mesh.replicate;
  TESSERA_CHECK(ValueError, !options.captured || (options.layout.device == at::kCUDA && world_size == 1),
                "--captured: needs --device cuda and one process, not {} on {}", world_size,
                c10::DeviceTypeName(options.layout.device, /*lower_case=*/true));
  TESSERA_CHECK(ValueError, !options.captured || (options.layout_independent == 0 && !options.watch.check_numerics),
                "--captured: leave --layout-independent and --check-numerics out, which read values in a step");
  check_layout_independent_option(
      options.layout_independent,
      {.batch = options.batch, .accumulate = options.accumulate, .data_ranks = slices, .tp = mesh.tp});
  TESSERA_CHECK(ValueError, options.layout_independent == 0 || !options.check_parity,
                "--layout-independent: leave --check-parity out, which adds in the order of ranks");
  TESSERA_CHECK(ValueError, options.layout_independent != 0 || options.batch % slices == 0,
                "--batch {}: must be a multiple of the {} ranks{}, which get equal parts of it", options.batch, slices,
                mesh.tp == 1 ? "" : " that see data of their own");
  check_positive("--accumulate", options.accumulate);
  TESSERA_CHECK(ValueError, options.batch / slices % options.accumulate == 0,
                "--accumulate {}: must divide a rank's {} samples of --batch {}", options.accumulate,
                options.batch / slices, options.batch);
  TESSERA_CHECK(ValueError, options.model.heads % mesh.tp == 0,
                "--heads {}: must be a multiple of --tp {}, so that each rank has whole heads", options.model.heads,
                mesh.tp);
  TESSERA_CHECK(ValueError, mesh.tp > 1 || !options.layout.sequence_parallel,
                "--sp: cuts activations over the ranks of --tp, of which there is one; add --tp 2 or more");
  TESSERA_CHECK(ValueError, options.eval_samples % options.batch == 0,
                "--eval-samples {}: must be a multiple of --batch {}", options.eval_samples, options.batch);
  TESSERA_CHECK(ValueError, options.warmup >= 0, "--warmup {}: must not be negative", options.warmup);
  TESSERA_CHECK(ValueError, options.sample_bytes >= 0, "--sample-bytes {}: must not be negative", options.sample_bytes);
  TESSERA_CHECK(ValueError, !options.prompt.empty(), "--prompt '': must have at least one byte");
  TESSERA_CHECK(ValueError, options.lr > 0 && std::isfinite(options.lr), "--lr {}: must be above 0 and finite",
                options.lr);
  TESSERA_CHECK(ValueError, options.weight_decay >= 0 && std::isfinite(options.weight_decay),
                "--weight-decay {}: must not be negative or infinite", options.weight_decay);
  TESSERA_CHECK(ValueError, options.save_every >= 0, "--save-every {}: must not be negative", options.save_every);
  TESSERA_CHECK(ValueError, options.keep_last >= 0, "--keep-last {}: must not be negative", options.keep_last);
  TESSERA_CHECK(ValueError, options.save_every > 0 || !options.async_save,
                "--async-save: nothing is saved without --save-every");
  TESSERA_CHECK(ValueError, !options.check_parity || !options.resume,
                "--check-parity: compares whole runs; leave --resume and --max-restarts out");
  TESSERA_CHECK(ValueError, options.clip >= 0 && std::isfinite(options.clip),
                "--clip {}: must not be negative or infinite; 0 clips nothing", options.clip);
  TESSERA_CHECK(ValueError, options.temperature > 0 && std::isfinite(options.temperature),
                "--temperature {}: must be above 0 and finite", options.temperature);
}

}  // namespace tessera::examples
