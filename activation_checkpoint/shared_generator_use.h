#pragma once
// Where ranks are threads of one process, plain tensors of all ranks draw from libtorch's one default generator. Its
// state before a forward says nothing then about what the forward drew, so dropout could not be repeated. This notices
// such a draw, so that it becomes an error and no wrong gradient.
//
// Thread safety: watches the calling thread.

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace tessera {

/// Whether ranks are threads, which have libtorch's default generators in common.
bool ranks_share_generators();

class SharedGeneratorUse {
 public:
  /// Watches until its end if `enabled` and ranks share generators; costs nothing otherwise.
  explicit SharedGeneratorUse(bool enabled);
  ~SharedGeneratorUse();
  SharedGeneratorUse(const SharedGeneratorUse&) = delete;
  SharedGeneratorUse& operator=(const SharedGeneratorUse&) = delete;

  /// Throws NotImplementedError that names the op if there was a draw.
  void check(const std::string& place) const;

 private:
  std::optional<at::CallbackHandle> callback_;
  std::string outer_op_;
};

}  // namespace tessera
