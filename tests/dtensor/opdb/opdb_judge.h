#pragma once
// Runs a case of the corpus on DTensors over ranks that are threads, and judges what came of it.

#include <string>

#include "tests/dtensor/opdb/opdb_assignment.h"
#include "tests/dtensor/opdb/opdb_expected.h"

namespace tessera {

enum class Outcome {
  Ok,           // every rank has the expected results
  Unsupported,  // every rank raised
  Wrong,        // a value, shape or dtype differs on some rank, or the library broke an invariant of its own
  Diverge,      // some ranks raised and others did not, or waited for them in vain: a hang in a real program
  Crash,        // the process died
};

const char* name_of(Outcome outcome);

struct Judgement {
  Outcome outcome = Outcome::Ok;
  std::string reason = {};  // empty if Ok
  /// Where values were compared, the largest distance of an element from what it should be, as a part of its bound.
  double worst_part = 0;
};

/// The ranks that run a case: threads on a mesh of this shape, with tensors on `device`.
struct OpdbRanks {
  std::vector<int64_t> mesh = {2};
  c10::DeviceType device = c10::kCPU;
  /// Whether the results have to be the recorded ones, which are the CPU's; else those of a plain call on `device`,
  /// whose kernels may save other things, or order equal elements otherwise, or the recorded ones all the same. Where
  /// that raises, all ranks have to.
  bool expects_recorded = true;
};

/// Never throws for what the op does. Collectives that wait for more than ten seconds count as Diverge.
Judgement judge(const OpdbCase& test, const c10::OperatorHandle& op, const ExpectedCall& expected,
                const Assignment& assignment, const OpdbRanks& ranks);

}  // namespace tessera
