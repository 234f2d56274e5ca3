#pragma once
// The library's exceptions, and macros that throw them.
//
// A user's error throws an exception with the place, the value, what is allowed and, if known, the remedy. Such checks
// must depend only on what all ranks share (configuration, shapes, placements), so that all ranks throw or none. An
// error of the library itself is an AssertionError. The library never ends the process.
//
//   TESSERA_CHECK(ValueError, dim < ndim, "Shard(dim={}): a tensor of {} dims has dims 0 to {}", ...);
//   TESSERA_ASSERT(sizes.size() == strides.size(), "{} sizes, {} strides", ...);

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace tessera {

/// Base of all exceptions that the library throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument has an invalid value.
class ValueError : public Error {
 public:
  using Error::Error;
};

/// A name (mesh axis, module, parameter) does not exist.
class KeyError : public Error {
 public:
  using Error::Error;
};

/// A combination is not supported.
class NotImplementedError : public Error {
 public:
  using Error::Error;
};

/// A call comes at the wrong time: before set-up, twice, or in the wrong order.
class StateError : public Error {
 public:
  using Error::Error;
};

/// A collective failed: a peer left, a timeout expired, or ranks called different collectives.
class CommError : public Error {
 public:
  using Error::Error;
};

/// An invariant of the library is violated; please report it.
class AssertionError : public Error {
 public:
  using Error::Error;
};

namespace detail {
[[noreturn]] void assertion_failed(const char* condition, const char* file, int line, const std::string& message);
}  // namespace detail

}  // namespace tessera

#define TESSERA_CHECK(ErrorType, condition, ...)              \
  do {                                                        \
    if (!(condition)) [[unlikely]] {                          \
      throw ::tessera::ErrorType(::fmt::format(__VA_ARGS__)); \
    }                                                         \
  } while (false)

#define TESSERA_ASSERT(condition, ...)                                                                 \
  do {                                                                                                 \
    if (!(condition)) [[unlikely]] {                                                                   \
      ::tessera::detail::assertion_failed(#condition, __FILE__, __LINE__, ::fmt::format(__VA_ARGS__)); \
    }                                                                                                  \
  } while (false)
