#pragma once
// Counts, observes and records a call when its backend gets it; internal to comm.

#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/collectives.h"
#include "comm/context/collective.h"
#include "comm/context/flight_record.h"

namespace tessera::detail {

/// Description of a rank's call. -1 marks a field that the call does not have.
struct CallFacts {
  Collective kind = Collective::Barrier;
  int64_t bytes_sent = 0;  // counted like CommStats
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int64_t input_numel = -1;
  int64_t output_numel = -1;
  int op = -1;    // ReduceOp
  int peer = -1;  // source, destination or the other rank, in the group
};

/// Returns the facts of a call with both tensors, or with one tensor passed as both.
inline CallFacts tensor_facts(Collective kind, int64_t bytes_sent, const at::Tensor& input, const at::Tensor& output) {
  return {.kind = kind,
          .bytes_sent = bytes_sent,
          .dtype = input.scalar_type(),
          .input_numel = input.numel(),
          .output_numel = output.numel()};
}

FlightCall record_call(const CallFacts& facts, const c10d::Backend& backend);

/// Range for libtorch's profiler around part of a call: "comm issue #17", with the call's number in the flight record.
/// Costs one branch without a profiler.
class FlightRange {
 public:
  FlightRange(const char* part, const FlightCall& call);

 private:
  at::RecordFunction range_;
};

/// Records the call and launches it.
template <class Launch>
Pending launch_recorded(const CallFacts& facts, const c10d::Backend& backend, Launch&& launch) {
  const FlightCall call = record_call(facts, backend);
  const FlightRange range("issue", call);
  try {
    return Pending(launch(), call);
  } catch (...) {
    call.ends(FlightState::Failed);
    throw;
  }
}

}  // namespace tessera::detail
