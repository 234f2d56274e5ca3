#include "examples/training/restart_options.h"

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "comm/run_elastic.h"

namespace tessera::examples {

void add_restart_options(CLI::App& app, RestartOptions& options, const std::string& group) {
  app.add_option("--max-restarts", options.max_restarts,
                 "how often processes are started again after one has failed; then, and at the\n"
                 "start, they go on as with --resume. Needs --save-every or --in-memory-every")
      ->capture_default_str()
      ->group(group);
  app.add_option("--min-ranks", options.min_ranks,
                 "with --max-restarts: a process that fails twice at its start is left out, as\n"
                 "long as this many remain; 0: none is")
      ->capture_default_str()
      ->group(group);
  app.add_flag("--keep-survivors", options.keep_survivors,
               "with --max-restarts: only processes that have failed are started again; the others\n"
               "stay, and build the model anew. Not under torchrun, which ends all of them")
      ->group(group);
  app.add_option("--in-memory-every", options.in_memory_every,
                 "with --max-restarts: steps between in-memory checkpoints, which restarts go on\n"
                 "from where they are newest; 0: none")
      ->capture_default_str()
      ->group(group);
}

void check_restart_options(const RestartOptions& options, int nproc, const CheckpointUse& use) {
  const auto& [max_restarts, min_ranks, keep_survivors, in_memory_every] = options;
  TESSERA_CHECK(ValueError, max_restarts >= 0, "--max-restarts {}: must not be negative", max_restarts);
  TESSERA_CHECK(ValueError, in_memory_every >= 0, "--in-memory-every {}: must not be negative", in_memory_every);
  TESSERA_CHECK(ValueError, max_restarts == 0 || use.save_every > 0 || in_memory_every > 0,
                "--max-restarts {}: without --save-every or --in-memory-every there is nothing to go on from",
                max_restarts);
  TESSERA_CHECK(ValueError, in_memory_every == 0 || max_restarts > 0 || (use.resume && !job_memory_folder().empty()),
                "--in-memory-every {}: goes with --max-restarts; under another launcher that starts ranks again, with "
                "--resume and TESSERA_MEMORY_DIR, a new folder of the job",
                in_memory_every);
  TESSERA_CHECK(ValueError, !keep_survivors || max_restarts > 0,
                "--keep-survivors: goes with --max-restarts, at least 1");
  TESSERA_CHECK(
      ValueError, !keep_survivors || !launched_as_rank() || keeps_survivors(),
      "--keep-survivors: torchrun and other launchers end all ranks after one has failed; leave it out, or start "
      "the program without them, with --nproc");
  TESSERA_CHECK(ValueError, min_ranks >= 0 && min_ranks <= nproc, "--min-ranks {}: must be 0 to --nproc, {}", min_ranks,
                nproc);
}

LaunchOptions launch_options(const RestartOptions& options, int nproc) {
  return {.nproc = nproc,
          .max_restarts = options.max_restarts,
          .min_ranks = options.min_ranks,
          .keep_survivors = options.keep_survivors};
}

std::string memory_folder(const RestartOptions& options) {
  return options.in_memory_every > 0 ? job_memory_folder() : "";
}

}  // namespace tessera::examples
