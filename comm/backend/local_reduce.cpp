#include "comm/backend/local_reduce.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <type_traits>

#include "base/error.h"

namespace tessera {

namespace {

constexpr int64_t kBlock = 1024;  // elements, so that the accumulators of a block stay in the L1 cache

template <typename T>
constexpr bool is_complex = std::is_same_v<T, c10::complex<float>> || std::is_same_v<T, c10::complex<double>>;

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>;

// Signed overflow wraps, as in tensor arithmetic.
template <typename T>
using Wrapping = typename std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>, std::make_unsigned<T>,
                                             std::type_identity<T>>::type;

struct Add {
  template <typename A>
  A operator()(A a, A b) const {
    if constexpr (std::is_same_v<A, bool>) {
      return a || b;
    } else {
      return static_cast<A>(static_cast<Wrapping<A>>(a) + static_cast<Wrapping<A>>(b));
    }
  }
};

struct Multiply {
  template <typename A>
  A operator()(A a, A b) const {
    if constexpr (std::is_same_v<A, bool>) {
      return a && b;
    } else if constexpr (std::is_integral_v<A>) {
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};

// NaN propagates from either side.
struct Minimum {
  template <typename A>
  A operator()(A a, A b) const {
    return (a < b || a != a) ? a : b;
  }
};

struct Maximum {
  template <typename A>
  A operator()(A a, A b) const {
    return (a > b || a != a) ? a : b;
  }
};

template <typename T, typename Combine>
void reduce_blocks(T* output, c10::ArrayRef<const void*> inputs, int64_t numel, bool average, Combine combine) {
  using A = Accumulator<T>;
  A accumulators[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, numel - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (int64_t i = 0; i < count; ++i) {
      accumulators[i] = static_cast<A>(first[i]);
    }
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      const T* next = static_cast<const T*>(inputs[rank]) + begin;
      for (int64_t i = 0; i < count; ++i) {
        accumulators[i] = combine(accumulators[i], static_cast<A>(next[i]));
      }
    }
    if constexpr (!std::is_integral_v<T>) {
      if (average) {
        const auto ranks = static_cast<typename c10::scalar_value_type<A>::type>(inputs.size());
        for (int64_t i = 0; i < count; ++i) {
          accumulators[i] = accumulators[i] / ranks;
        }
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      output[begin + i] = static_cast<T>(accumulators[i]);
    }
  }
}

template <typename T>
void reduce_as(void* output, c10::ArrayRef<const void*> inputs, int64_t numel, ReduceOp op) {
  T* typed = static_cast<T*>(output);
  switch (op) {
    case ReduceOp::Sum:
      return reduce_blocks(typed, inputs, numel, /*average=*/false, Add());
    case ReduceOp::Avg:
      return reduce_blocks(typed, inputs, numel, /*average=*/true, Add());
    case ReduceOp::Product:
      return reduce_blocks(typed, inputs, numel, /*average=*/false, Multiply());
    case ReduceOp::Min:
    case ReduceOp::Max:
      if constexpr (!is_complex<T>) {
        return op == ReduceOp::Min ? reduce_blocks(typed, inputs, numel, /*average=*/false, Minimum())
                                   : reduce_blocks(typed, inputs, numel, /*average=*/false, Maximum());
      }
  }
  TESSERA_ASSERT(false, "{} on a type without it", op);
}

bool has_arithmetic(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Bool:
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
      return true;
    default:
      return false;
  }
}

}  // namespace

void check_reducible(std::string_view place, c10::ScalarType dtype, ReduceOp op) {
  TESSERA_CHECK(NotImplementedError, has_arithmetic(dtype), "{}: no reduction for dtype {}; cast to float32 first",
                place, c10::toString(dtype));
  TESSERA_CHECK(ValueError, op != ReduceOp::Avg || c10::isFloatingType(dtype) || c10::isComplexType(dtype),
                "{}: ReduceOp Avg on dtype {}: an average needs a floating or complex type; use Sum or cast", place,
                c10::toString(dtype));
  TESSERA_CHECK(ValueError, (op != ReduceOp::Min && op != ReduceOp::Max) || !c10::isComplexType(dtype),
                "{}: ReduceOp {} on dtype {}: complex numbers have no order", place, op, c10::toString(dtype));
}

void reduce_in_order(void* output, c10::ArrayRef<const void*> inputs, int64_t numel, c10::ScalarType dtype,
                     ReduceOp op) {
  TESSERA_ASSERT(!inputs.empty(), "nothing to reduce");
  switch (dtype) {
    case c10::ScalarType::Bool:
      return reduce_as<bool>(output, inputs, numel, op);
    case c10::ScalarType::Byte:
      return reduce_as<uint8_t>(output, inputs, numel, op);
    case c10::ScalarType::Char:
      return reduce_as<int8_t>(output, inputs, numel, op);
    case c10::ScalarType::Short:
      return reduce_as<int16_t>(output, inputs, numel, op);
    case c10::ScalarType::Int:
      return reduce_as<int32_t>(output, inputs, numel, op);
    case c10::ScalarType::Long:
      return reduce_as<int64_t>(output, inputs, numel, op);
    case c10::ScalarType::Half:
      return reduce_as<c10::Half>(output, inputs, numel, op);
    case c10::ScalarType::BFloat16:
      return reduce_as<c10::BFloat16>(output, inputs, numel, op);
    case c10::ScalarType::Float:
      return reduce_as<float>(output, inputs, numel, op);
    case c10::ScalarType::Double:
      return reduce_as<double>(output, inputs, numel, op);
    case c10::ScalarType::ComplexFloat:
      return reduce_as<c10::complex<float>>(output, inputs, numel, op);
    case c10::ScalarType::ComplexDouble:
      return reduce_as<c10::complex<double>>(output, inputs, numel, op);
    default:
      TESSERA_ASSERT(false, "no reduction for dtype {}", c10::toString(dtype));
  }
}

}  // namespace tessera
