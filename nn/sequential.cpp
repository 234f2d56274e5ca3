#include "nn/sequential.h"

#include "nn/hooks/clone_memo.h"

namespace tessera::nn {

SequentialImpl::SequentialImpl(std::initializer_list<SequentialEntry> entries) {
  for (const auto& entry : entries) push_back(entry);
}

void SequentialImpl::push_back(SequentialEntry entry) {
  TESSERA_CHECK(ValueError, entry.module() != nullptr, "Sequential: the module {} is null", entry.name());
  TESSERA_CHECK(ValueError, !entry.name().empty() && entry.name().find('.') == std::string::npos,
                "Sequential: the module name \"{}\" is empty or has a dot", entry.name());
  TESSERA_CHECK(ValueError, !named_children().contains(entry.name()),
                "Sequential: there is a module {} already; give another name", entry.name());
  register_module(entry.name(), entry.module());
  entries_.push_back(std::move(entry));
}

at::Tensor SequentialImpl::forward(at::Tensor input) {
  TESSERA_CHECK(ValueError, !is_empty(), "Sequential: forward of an empty chain; push_back a module first");
  for (const auto& entry : entries_) input = entry.forward(std::move(input));
  return input;
}

const std::shared_ptr<torch::nn::Module>& SequentialImpl::ptr(size_t index) const {
  TESSERA_CHECK(ValueError, index < size(), "Sequential: index {}, but there are {} modules", index, size());
  return entries_[index].module();
}

std::shared_ptr<torch::nn::Module> SequentialImpl::clone(const std::optional<at::Device>& device) const {
  CloneMemo memo;
  auto copy = std::make_shared<SequentialImpl>(*this);
  for (auto& entry : copy->entries_) {
    auto module = memo.clone(entry.module_, device);
    TESSERA_CHECK(NotImplementedError, typeid(*module) == typeid(*entry.module_),
                  "clone: the clone of {} is a {}, not a {}; derive the type from torch::nn::Cloneable<its own type>",
                  entry.name_, c10::demangle(typeid(*module).name()), c10::demangle(typeid(*entry.module_).name()));
    copy->replace_module(entry.name_, module);
    entry.module_ = std::move(module);
  }
  return copy;
}

void SequentialImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::Sequential";
}

}  // namespace tessera::nn
