// Runs the test binaries: Catch2 with one thread for tensor operations, so that ranks as threads do not compete for
// cores and sums do not depend on the machine. A failed run prints its seed (repeat it with Catch2's --rng-seed).
// Supports Bazel's options: `--test_filter=SPEC`, a Catch2 test specification, and one shard of `shard_count`.

#define CATCH_CONFIG_RUNNER
#include "third_party/catch2/catch.h"

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "testing/test_spec.h"

namespace {

/// Shard of a test, from Bazel's environment variables.
struct Shard {
  int count = 1;
  int index = 0;
};

Shard shard_of_this_process() {
  const char* count = std::getenv("TEST_TOTAL_SHARDS");
  const char* index = std::getenv("TEST_SHARD_INDEX");
  if (!count || !index) {
    return {};
  }
  if (const char* status_file = std::getenv("TEST_SHARD_STATUS_FILE")) {
    std::ofstream touched(status_file);  // tells Bazel that the program supports sharding
  }
  return {.count = std::stoi(count), .index = std::stoi(index)};
}

void use_test_filter(Catch::ConfigData& options) {
  const char* filter = std::getenv("TESTBRIDGE_TEST_ONLY");
  if (filter && options.testsOrTags.empty()) {
    options.testsOrTags.emplace_back(filter);
  }
}

#if CATCH_VERSION_MAJOR >= 3

bool select_shard(Catch::Session& session, const Shard& shard) {
  session.configData().shardCount = static_cast<unsigned int>(shard.count);
  session.configData().shardIndex = static_cast<unsigned int>(shard.index);
  session.configData().allowZeroTests = true;
  return true;
}

#else

std::vector<std::string> selected_test_names(Catch::Session& session) {
  const Catch::TestSpec& spec = session.config().testSpec();
  std::vector<std::string> names;
  for (const Catch::TestCase& test : Catch::getAllTestCasesSorted(session.config())) {
    if (spec.hasFilters() ? spec.matches(test) : !test.isHidden()) {
      names.push_back(test.name);
    }
  }
  return names;
}

// Selects every n-th test case. Returns false if none is left: without names, Catch2 would run all.
bool select_shard(Catch::Session& session, const Shard& shard) {
  const std::vector<std::string> names = selected_test_names(session);
  std::string spec;
  for (size_t i = static_cast<size_t>(shard.index); i < names.size(); i += static_cast<size_t>(shard.count)) {
    spec += (spec.empty() ? "" : ",") + tessera::testing::exact_test_spec(names[i]);
  }
  Catch::ConfigData options = session.configData();
  options.testsOrTags = {spec};
  session.useConfigData(options);
  return !spec.empty();
}

#endif

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  Catch::Session session;
  if (const int bad_arguments = session.applyCommandLine(argc, argv); bad_arguments != 0) {
    return bad_arguments;
  }
  use_test_filter(session.configData());
  const Shard shard = shard_of_this_process();
  if (shard.count > 1 && !select_shard(session, shard)) {
    return 0;
  }
  const int failures = session.run();
  if (failures != 0) {
    std::fprintf(stderr, "seed of this run: --rng-seed %u\n", session.config().rngSeed());
  }
  return failures;
}
