#pragma once
// Detects random draws that a second forward could not repeat, because ranks that are threads share one generator.
// Thread safety: watches the calling thread.

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace tessera {

/// Returns whether ranks are threads, which share libtorch's default generators.
bool ranks_share_generators();

class SharedGeneratorUse {
 public:
  /// Starts watching if `enabled` and ranks share generators; otherwise costs nothing.
  explicit SharedGeneratorUse(bool enabled);
  ~SharedGeneratorUse();
  SharedGeneratorUse(const SharedGeneratorUse&) = delete;
  SharedGeneratorUse& operator=(const SharedGeneratorUse&) = delete;

  /// Throws NotImplementedError, naming the op, if there was a draw.
  void check(const std::string& place) const;

 private:
  std::optional<at::CallbackHandle> callback_;
  std::string outer_op_;
};

}  // namespace tessera
