// The runner of the test binaries: Catch2 with one thread for tensor operations, so that ranks as threads do not fight
// for cores and sums do not depend on the machine. A failed run names its seed (Catch2's --rng-seed repeats it).

#define CATCH_CONFIG_RUNNER
#include "third_party/catch2/catch.h"

#include <ATen/Parallel.h>

#include <cstdio>

int main(int argc, char** argv) {
  at::set_num_threads(1);
  Catch::Session session;
  if (const int bad_arguments = session.applyCommandLine(argc, argv); bad_arguments != 0) {
    return bad_arguments;
  }
  const int failures = session.run();
  if (failures != 0) {
    std::fprintf(stderr, "seed of this run: --rng-seed %u\n", session.config().rngSeed());
  }
  return failures;
}
