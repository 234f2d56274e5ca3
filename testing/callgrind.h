#pragma once
// Instructions as callgrind counts them: numbers that do not depend on what else the machine does. A test starts a
// probe, a program of its own that names what is to be counted:
//
//   int main() { count_instructions("add", 100, [&] { a.add(b); }); }           // the probe
//   const auto counts = run_probe("tests/dtensor/dispatch_cost_probe");         // the test
//   CHECK(counts.at("add") <= 3900);
//
// Thread safety: for one thread of a process.

#include <functional>
#include <map>
#include <string>

namespace tessera::testing {

/// Counts `calls` calls after some that are not counted. Outside of callgrind it only calls.
void count_instructions(const std::string& name, int calls, const std::function<void()>& call);

/// Instructions of one call, by name. `program`: from the runfiles' root. Empty, after a line to stderr that says why,
/// where there is no valgrind or a sanitizer is in force. Throws Error where the probe fails.
std::map<std::string, double> run_probe(const std::string& program);

}  // namespace tessera::testing
