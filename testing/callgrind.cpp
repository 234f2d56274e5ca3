#include "testing/callgrind.h"

#include <fmt/format.h>
#include <valgrind/callgrind.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "testing/temp_folder.h"

namespace tessera::testing {

namespace {

constexpr int kWarmUp = 5;
constexpr bool kIsSanitized =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

/// Parses dumps, which are named "<calls> <name>".
void read_dump(const std::filesystem::path& path, std::map<std::string, double>& counts) {
  const std::string trigger = "desc: Trigger: Client Request: ", summary = "summary: ";
  std::ifstream stream(path);
  std::string name;
  for (std::string line; std::getline(stream, line);) {
    if (line.starts_with(trigger)) {
      name = line.substr(trigger.size());
    } else if (line.starts_with(summary) && !name.empty()) {
      const size_t blank = name.find(' ');
      counts[name.substr(blank + 1)] = std::stod(line.substr(summary.size())) / std::stod(name.substr(0, blank));
    }
  }
}

}  // namespace

void count_instructions(const std::string& name, int calls, const std::function<void()>& call) {
  CALLGRIND_START_INSTRUMENTATION;  // after libtorch's startup, which it would slow down several times
  for (int i = 0; i < kWarmUp; ++i) {
    call();
  }
  const std::string dump = fmt::format("{} {}", calls, name);
  CALLGRIND_TOGGLE_COLLECT;
  for (int i = 0; i < calls; ++i) {
    call();
  }
  CALLGRIND_TOGGLE_COLLECT;
  CALLGRIND_DUMP_STATS_AT(dump.c_str());
}

void count_instructions(const std::string& name, const RankOfCount& rank, const std::function<void()>& call) {
  CALLGRIND_START_INSTRUMENTATION;
  call();
  rank.barrier();
  CALLGRIND_TOGGLE_COLLECT;  // for this thread
  call();
  CALLGRIND_TOGGLE_COLLECT;
  rank.barrier();
  if (rank.is_first) {
    const std::string dump = fmt::format("1 {}", name);
    CALLGRIND_DUMP_STATS_AT(dump.c_str());
  }
  rank.barrier();
}

std::map<std::string, double> run_probe(const std::string& program) {
  if (kIsSanitized) {
    fmt::print(stderr, "skipped: valgrind cannot run what a sanitizer instruments\n");
    return {};
  }
  if (std::system("command -v valgrind >/dev/null") != 0) {
    fmt::print(stderr, "skipped: there is no valgrind on this machine; ./bazelw installs it\n");
    return {};
  }
  const TempFolder folder;
  // Disables malloc's fast bins, which are consolidated at random times, at a cost of hundreds of instructions.
  const std::string command = fmt::format(
      "GLIBC_TUNABLES=glibc.malloc.mxfast=0 valgrind -q --tool=callgrind --instr-atstart=no --collect-atstart=no "
      "--callgrind-out-file='{}' {} >'{}' 2>&1",
      folder.path("out"), program, folder.path("log"));
  if (std::system(command.c_str()) != 0) {
    throw Error(fmt::format("{} fails under valgrind: {}", program, read_file(folder.path("log"))));
  }
  std::map<std::string, double> counts;
  for (const auto& file : std::filesystem::directory_iterator(folder.path())) {
    read_dump(file.path(), counts);
  }
  return counts;
}

}  // namespace tessera::testing
