#pragma once
// Counts instructions with callgrind, so that results do not depend on the machine's load. A test calls run_probe() on
// a separate program, which calls count_instructions(). Thread safety: one thread of a process.

#include <functional>
#include <map>
#include <string>

namespace tessera::testing {

/// Counts `calls` calls after some warm-up calls. Without callgrind, only calls.
void count_instructions(const std::string& name, int calls, const std::function<void()>& call);

/// One of several ranks that are threads and make the counted calls together.
struct RankOfCount {
  bool is_first = true;           // names the count
  std::function<void()> barrier;  // of all ranks; not counted
};

/// Counts one call that every rank makes, after a warm-up call: the instructions of all of their threads.
void count_instructions(const std::string& name, const RankOfCount& rank, const std::function<void()>& call);

/// Returns instructions per call, by name. `program` is a runfiles path. Returns nothing, with a note on stderr,
/// without valgrind or under a sanitizer. Throws Error if the probe fails.
std::map<std::string, double> run_probe(const std::string& program);

}  // namespace tessera::testing
