#pragma once
// What a recorded call gives on plain tensors, and how far each element of a sharded call's results may be from it.
//
// How far rounding moves an element depends on how it was computed: a sum that cancels is off by roundings of what was
// added, which may be thousands of its own. So the plain call is repeated, and an element's rounding error is the
// largest of
// - one rounding of the element itself,
// - its change where each input moves by one rounding, up or down by chance (Parker, "Monte Carlo Arithmetic", 1997),
// - its distance from the same call in float64, at the inputs and at some near them, where other roundings are made.
// An element may be off by kRoundingErrors of them, and by 1e-3 of itself and 1e-4 of the largest element at most.
//
// Over 19 million elements of 9 replays the largest distance was 3.5 of them.

#include <array>
#include <vector>

#include "tests/dtensor/opdb/opdb_corpus.h"

namespace tessera {

/// By how many of its rounding errors an element may be off at most.
constexpr double kRoundingErrors = 8;

/// What an element's bound comes from.
enum class BoundSource {
  OwnRounding,     // of the element itself
  RepeatedCalls,   // their results differ by more
  LargestElement,  // it allows less, as near a jump of the op
};
constexpr size_t kBoundSourceCount = 3;

struct ExpectedValue {
  c10::IValue value;
  /// In float64, for each number that comparable() gives; undefined where values must be equal (integers, and what is
  /// no number), or do not count.
  at::Tensor bound;
};

struct ExpectedCall {
  /// The plain call raises, and so have all ranks.
  bool raises = false;
  std::vector<ExpectedValue> results;
  std::vector<ExpectedValue> written;  // what the call leaves in the arguments that it writes
  /// Results that are right as well: kernels of another device leave some memory unwritten (nll_loss2d_forward's total
  /// weight without a reduction).
  std::vector<c10::IValue> otherwise;
  std::array<int64_t, kBoundSourceCount> elements{};  // by where their bounds come from
};

/// The numbers of the tensor arguments that the call writes.
std::vector<size_t> written_arguments(const OpdbCase& test);

/// The recorded results, or those of a plain call on `device`.
ExpectedCall expected_call(const OpdbCase& test, const c10::OperatorHandle& op, c10::DeviceType device,
                           bool expects_recorded);

/// The results of a call, lists opened.
std::vector<c10::IValue> results_on(const torch::jit::Stack& stack);

/// The same arguments with `device` in place of the CPU.
void move_device_arguments(torch::jit::Stack& stack, c10::DeviceType device);

/// A number or a tensor of them, on the CPU in float64, the parts of complex numbers apart.
at::Tensor comparable(const c10::IValue& value);

}  // namespace tessera
