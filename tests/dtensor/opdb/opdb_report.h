#pragma once
// The outcome of a replay as a table and as docs/generated/op_coverage.md.

#include <string>
#include <vector>

#include "tests/dtensor/opdb/opdb_runner.h"

namespace tessera {

/// All overloads on one mesh.
struct Replay {
  std::string mesh;  // "2", "2x3"
  std::vector<OverloadResult> overloads;
};

/// Markdown: a row a replay.
std::string summary_table(const std::vector<Replay>& replays);

/// Lines that tell what elements' bounds come from, and the largest distance as a part of its bound, for each replay.
std::string bounds_summary(const std::vector<Replay>& replays);

/// Markdown: the table, and every overload that is not full with the first reason.
std::string coverage_report(const std::vector<Replay>& replays);

}  // namespace tessera
