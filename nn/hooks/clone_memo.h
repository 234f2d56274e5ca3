#pragma once
// Remembers copied modules, so that a module that a container holds twice is one module in the copy too.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <unordered_map>

namespace tessera {

/// For clone() of containers. The outermost memo of a thread serves all containers that are cloned while it lives.
/// Thread safety: a memo must end in the thread that made it.
class CloneMemo {
 public:
  CloneMemo();
  ~CloneMemo();
  CloneMemo(const CloneMemo&) = delete;
  CloneMemo& operator=(const CloneMemo&) = delete;

  /// Returns the copy of `module`, which the first call clones.
  std::shared_ptr<torch::nn::Module> clone(const std::shared_ptr<torch::nn::Module>& module,
                                           const std::optional<at::Device>& device);

 private:
  // Keeps the originals alive, so that their addresses are not reused.
  std::unordered_map<std::shared_ptr<torch::nn::Module>, std::shared_ptr<torch::nn::Module>> copies_;
};

}  // namespace tessera
