#pragma once
// Which dtypes a value may change to on its way into a tensor that is there.

#include <c10/core/ScalarType.h>

namespace tessera {

/// Floating ones alone: of an integer or a complex number the other dtype may lose what counts.
inline bool may_cast(at::ScalarType from, at::ScalarType to) {
  return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
}

}  // namespace tessera
