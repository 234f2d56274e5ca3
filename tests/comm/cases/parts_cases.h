#pragma once
// What collectives with parts (comm/backend/tensor_segment.h) give, over any backend that takes them.

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace tessera::testing {

/// Called on every rank of the default group: both collectives with parts give the bits of those without, for parts
/// that `seed` draws, of at most `largest` elements a rank: with gaps, short and missing tensors; also where rank 0 has
/// the flat tensor and the others have parts, and where gathered elements are cast. What does not belong to the output
/// is left alone. Prints the seed on failure.
void check_segments_against_flat(uint64_t seed, int64_t largest, c10::ScalarType dtype);

}  // namespace tessera::testing
