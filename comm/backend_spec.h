#pragma once
// Parses a backend choice into a backend per device: "shm", "gloo", "threads", "nccl", "fake" or "cpu:gloo,cuda:nccl".

#include <string>

namespace tessera {

struct BackendSpec {
  static constexpr const char* kNone = "none";

  std::string cpu = kNone;   // "shm", "gloo", "threads", "fake", "" (each group chooses), or kNone
  std::string cuda = kNone;  // "nccl", "threads", "fake" or kNone

  bool operator==(const BackendSpec&) const = default;
};

BackendSpec parse_backend(const std::string& backend);  // throws ValueError

}  // namespace tessera
