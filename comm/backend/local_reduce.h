#pragma once
// The arithmetic of a reduction whose inputs all lie in this process's memory; CPU only.
//
//   float a[] = {1, 2}, b[] = {3, 4};
//   const void* inputs[] = {a, b};
//   reduce_in_order(a, inputs, 2, at::kFloat, ReduceOp::Avg);     // a = {2, 3}

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "comm/backend/reduce_op.h"

namespace tessera {

/// Throws ValueError for Avg on an integer type and Min or Max on a complex one, NotImplementedError for a dtype
/// without arithmetic here (float8 and the like); `place` opens the message.
void check_reducible(std::string_view place, c10::ScalarType dtype, ReduceOp op);

/// output[i] = inputs[0][i] op inputs[1][i] op ..., in this order (comm/backend/reduce_op.h has the rules for each
/// type). output may be one of the inputs; other overlaps are not allowed. Needs check_reducible's consent.
void reduce_in_order(void* output, c10::ArrayRef<const void*> inputs, int64_t numel, c10::ScalarType dtype,
                     ReduceOp op);

}  // namespace tessera
