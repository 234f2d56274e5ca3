#pragma once
// A module that stands in several places is one module in a copy, too.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <unordered_map>

namespace tessera {

/// For containers, in their clone(): the outermost one of a thread has the modules of all of them that are cloned while
/// it lives.
/// Thread safety: concerns the thread that made it, which must also end it.
class CloneMemo {
 public:
  CloneMemo();
  ~CloneMemo();
  CloneMemo(const CloneMemo&) = delete;
  CloneMemo& operator=(const CloneMemo&) = delete;

  /// The copy of `module`, cloned at the first time.
  std::shared_ptr<torch::nn::Module> copy_of(const std::shared_ptr<torch::nn::Module>& module,
                                             const std::optional<at::Device>& device);

 private:
  // Keeps the modules, so that no other one gets the address of one that has gone.
  std::unordered_map<std::shared_ptr<torch::nn::Module>, std::shared_ptr<torch::nn::Module>> copies_;
};

}  // namespace tessera
