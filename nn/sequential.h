#pragma once
// A chain of modules that map one tensor to one tensor. Unlike torch::nn::Sequential's, its forward is not a template,
// so that chains nest and have a hook point.
//
//   tessera::nn::Sequential mlp;
//   mlp->push_back("up", tessera::nn::Linear(64, 256));     // one statement per layer: arguments of a single call
//   would
//   mlp->push_back("act", tessera::nn::GELU());             // be constructed, and draw random numbers, in any order
//   mlp->push_back("down", tessera::nn::Linear(256, 64));
//   tessera::nn::Sequential net({{"mlp", mlp}, {"norm", tessera::nn::LayerNorm(LayerNormOptions({64}))}});
//   at::Tensor y = net(x);

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <initializer_list>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "nn/hooks/hooked.h"

namespace tessera::nn {

namespace detail {

template <class Impl>
concept CallsWithTensor = requires(Impl& impl, at::Tensor x) {
  { impl.call(x) } -> std::same_as<at::Tensor>;
};

template <class Impl>
concept TensorModule = std::derived_from<Impl, torch::nn::Module> &&
    (CallsWithTensor<Impl> || requires(Impl & impl, at::Tensor x) {
      { impl.forward(x) } -> std::same_as<at::Tensor>;
    });

template <class Impl>
std::shared_ptr<Impl> owned_module(const torch::nn::ModuleHolder<Impl>& holder) {
  return holder.ptr();
}
template <class Impl>
std::shared_ptr<Impl> owned_module(const std::shared_ptr<Impl>& module) {
  return module;
}

template <class M>
concept ModuleArgument = requires(const M& module) {
  owned_module(module);
};

}  // namespace detail

/// Element of a Sequential: a holder or shared pointer of a module that maps one tensor to one tensor. Stock torch::nn
/// modules are accepted, but have no hook point.
class SequentialEntry {
 public:
  template <detail::ModuleArgument M>
  SequentialEntry(std::string name, const M& module) : SequentialEntry(std::move(name), detail::owned_module(module)) {}

  template <class Impl>
  SequentialEntry(std::string name, const std::shared_ptr<Impl>& module)
      : name_(std::move(name)), module_(module), forward_(&run<Impl>) {
    static_assert(detail::TensorModule<Impl>,
                  "tessera::nn::Sequential: a module's forward must take one at::Tensor and return one at::Tensor; "
                  "write a module of one's own for other signatures");
  }

  const std::string& name() const { return name_; }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  at::Tensor forward(at::Tensor input) const { return forward_(*module_, std::move(input)); }

 private:
  friend class SequentialImpl;

  template <class Impl>
  static at::Tensor run(torch::nn::Module& module, at::Tensor input) {
    auto& impl = static_cast<Impl&>(module);
    if constexpr (detail::CallsWithTensor<Impl>) {
      return impl.call(std::move(input));
    } else {
      return impl.forward(std::move(input));
    }
  }

  std::string name_;
  std::shared_ptr<torch::nn::Module> module_;
  at::Tensor (*forward_)(torch::nn::Module&, at::Tensor);
};

/// Throws ValueError for a null module, an index out of range, and a forward without elements. Names must be new, not
/// empty, and without dots.
class SequentialImpl : public torch::nn::Cloneable<SequentialImpl> {
 public:
  SequentialImpl() = default;
  SequentialImpl(std::initializer_list<SequentialEntry> entries);
  template <detail::ModuleArgument... Modules>
  requires(sizeof...(Modules) > 0) explicit SequentialImpl(const Modules&... modules) { (push_back(modules), ...); }

  template <detail::ModuleArgument M>
  void push_back(const M& module) {
    push_back(std::to_string(size()), module);
  }
  template <detail::ModuleArgument M>
  void push_back(std::string name, const M& module) {
    push_back(SequentialEntry(std::move(name), module));
  }
  void push_back(SequentialEntry entry);

  at::Tensor forward(at::Tensor input);

  size_t size() const noexcept { return entries_.size(); }
  bool is_empty() const noexcept { return entries_.empty(); }
  const std::shared_ptr<torch::nn::Module>& ptr(size_t index) const;
  std::shared_ptr<torch::nn::Module> operator[](size_t index) const { return ptr(index); }
  /// Returns an element as its type: `net->at<torch::nn::LinearImpl>(0).weight`. Throws ValueError for another type.
  template <class Impl>
  Impl& at(size_t index) const {
    auto* const impl = dynamic_cast<Impl*>(ptr(index).get());
    TESSERA_CHECK(ValueError, impl != nullptr, "Sequential: element {} is a {}, not a {}", index,
                  c10::demangle(typeid(*ptr(index)).name()), c10::demangle(typeid(Impl).name()));
    return *impl;
  }
  std::vector<SequentialEntry>::const_iterator begin() const noexcept { return entries_.begin(); }
  std::vector<SequentialEntry>::const_iterator end() const noexcept { return entries_.end(); }

  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;
  void reset() override {}
  void pretty_print(std::ostream& stream) const override;

 private:
  std::vector<SequentialEntry> entries_;
};

class Sequential : public HookedHolder<Hooked<SequentialImpl>> {
 public:
  using HookedHolder::HookedHolder;
  using Impl = Hooked<SequentialImpl>;
  Sequential() = default;
  // Converts from its base, like libtorch's holders.
  // NOLINTNEXTLINE(google-explicit-constructor)
  Sequential(HookedHolder other) : HookedHolder(std::move(other)) {}
  Sequential(std::initializer_list<SequentialEntry> entries) : HookedHolder(std::make_shared<Impl>(entries)) {}
};

}  // namespace tessera::nn
