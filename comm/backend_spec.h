#pragma once
// Which backends a group has, by the device of the tensors that they take, from what a program asks for:
//
//   "shm", "gloo"   CPU only            "fake"                 any device
//   "threads"       CPU and CUDA        "cpu:gloo,cuda:nccl"   each its own; in any order, but not "fake"
//   "nccl"          CUDA only           ""                     CPU, each group chooses between shm, gloo and both
//
// "cpu:threads" is for the CPU alone.

#include <string>

namespace tessera {

struct BackendSpec {
  static constexpr const char* kNone = "none";

  /// "shm", "gloo", "threads", "fake", "" (each group chooses), or kNone.
  std::string cpu = kNone;
  /// "nccl", "threads", "fake" or kNone.
  std::string cuda = kNone;

  bool operator==(const BackendSpec&) const = default;
};

/// Throws ValueError that names the part and what is allowed.
BackendSpec parse_backend(const std::string& backend);

}  // namespace tessera
