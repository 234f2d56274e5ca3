#include "nn/hooks/clone_memo.h"

namespace tessera {

namespace {

thread_local CloneMemo* outermost = nullptr;

}  // namespace

CloneMemo::CloneMemo() {
  if (outermost == nullptr) outermost = this;
}

CloneMemo::~CloneMemo() {
  if (outermost == this) outermost = nullptr;
}

std::shared_ptr<torch::nn::Module> CloneMemo::clone(const std::shared_ptr<torch::nn::Module>& module,
                                                    const std::optional<at::Device>& device) {
  auto& copies = outermost->copies_;
  if (const auto found = copies.find(module); found != copies.end()) return found->second;
  auto copy = module->clone(device);
  copies.emplace(module, copy);
  return copy;
}

}  // namespace tessera
