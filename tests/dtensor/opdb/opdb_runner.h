#pragma once
// Runs cases in a child process, so that a crash costs one run and a hang is ended.

#include <vector>

#include "tests/dtensor/opdb/opdb_judge.h"

namespace tessera {

struct OpdbRun {
  std::string label = {};  // "aten::add.Tensor#3 0S1"
  Judgement judgement = {};
  std::array<int64_t, kBoundSourceCount> elements{};  // of the results, by where their bounds come from
};

/// Each case with the assignments() or, where `draws` is not 0, as many drawn_assignments(). The calling process must
/// not have started threads, nor used CUDA: it forks.
/// Throws ValueError for a mesh of more axes without draws.
std::vector<OpdbRun> run_cases(const std::vector<OpdbCase>& cases, const OpdbRanks& ranks, int draws = 0);

/// The runs of all cases of one overload.
struct OverloadResult {
  std::string overload;
  std::vector<OpdbRun> runs;

  size_t count(Outcome outcome) const;
  bool is_full() const { return count(Outcome::Ok) == runs.size(); }
  bool is_wrong() const;
};

}  // namespace tessera
