#pragma once
// Dtypes that a value may be cast to when it is stored in an existing tensor.

#include <c10/core/ScalarType.h>

namespace tessera {

/// Returns whether both are floating or equal: other casts may lose information.
inline bool may_cast(at::ScalarType from, at::ScalarType to) {
  return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
}

}  // namespace tessera
