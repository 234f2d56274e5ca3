#pragma once
// Parameter type of functions that take a module as a holder, as a shared pointer, or itself.
//
//   void check_something(ModuleRef module);
//   check_something(net);                  // a holder from TESSERA_MODULE or TORCH_MODULE
//   check_something(*net);
//   for (const auto& child : net->children()) check_something(child);
//
// Does not own the module, which must outlive it. Thread safety: like a reference.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>

#include "base/error.h"

namespace tessera {

class ModuleRef {
 public:
  ModuleRef(torch::nn::Module& module) : module_(&module) {}  // NOLINT: converts implicitly
  /// Throws c10::Error for an empty holder.
  template <class Impl>
  ModuleRef(const torch::nn::ModuleHolder<Impl>& holder) : module_(holder.ptr().get()) {}  // NOLINT
  /// Throws ValueError for a null pointer.
  template <std::derived_from<torch::nn::Module> Impl>
  ModuleRef(const std::shared_ptr<Impl>& module) : module_(module.get()) {  // NOLINT
    TESSERA_CHECK(ValueError, module_ != nullptr, "a null pointer in place of a module");
  }

  torch::nn::Module& operator*() const { return *module_; }
  torch::nn::Module* operator->() const { return module_; }

 private:
  torch::nn::Module* module_;
};

}  // namespace tessera
