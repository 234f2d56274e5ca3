#pragma once
// Reduces inputs in this process's CPU memory.
//
//   float a[] = {1, 2}, b[] = {3, 4};
//   const void* inputs[] = {a, b};
//   reduce_in_order(a, inputs, 2, at::kFloat, ReduceOp::Avg);  // a = {2, 3}

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "comm/backend/reduce_op.h"

namespace tessera {

/// Throws ValueError for Avg of integers and for Min or Max of complex numbers. Throws NotImplementedError for dtypes
/// without arithmetic, such as float8. Messages begin with `place`.
void check_reducible(std::string_view place, c10::ScalarType dtype, ReduceOp op);

/// Computes output[i] = inputs[0][i] op inputs[1][i] op ..., in this order (comm/backend/reduce_op.h). `output` may be
/// one of the inputs, but must not overlap them otherwise. Requires check_reducible().
void reduce_in_order(void* output, c10::ArrayRef<const void*> inputs, int64_t numel, c10::ScalarType dtype,
                     ReduceOp op);

}  // namespace tessera
