#pragma once
// What destructors and threads of the library's own say: they have nobody to throw to.

#include <fmt/format.h>

#include <cstdio>
#include <utility>

namespace tessera {

/// Writes a line to stderr. What cannot be written, or put into words, is dropped. Thread safety: any thread.
template <class... Args>
void report_failure(fmt::format_string<Args...> format, Args&&... args) noexcept {
  try {
    fmt::print(stderr, "{}\n", fmt::format(format, std::forward<Args>(args)...));
  } catch (...) {  // stderr is closed, or memory is short
  }
}

}  // namespace tessera
