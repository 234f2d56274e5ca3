#pragma once
// Which backends a group has, by the device of the tensors that they take, from what a program asks for:
//
//   "shm", "gloo", "threads"   CPU only               "fake"                 any device
//   "nccl"                     CUDA only              "cpu:gloo,cuda:nccl"   each its own; in any order, but not "fake"
//   ""                         CPU, each group chooses between shm, gloo and both

#include <string>

namespace tessera {

struct BackendSpec {
  static constexpr const char* kNone = "none";

  /// "shm", "gloo", "threads", "fake", "" (each group chooses), or kNone.
  std::string cpu = kNone;
  /// "nccl", "fake" or kNone.
  std::string cuda = kNone;

  bool operator==(const BackendSpec&) const = default;
};

/// Throws ValueError that names the part and what is allowed.
BackendSpec parse_backend(const std::string& backend);

}  // namespace tessera
