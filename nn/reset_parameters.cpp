#include "nn/reset_parameters.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "nn/hooks/hook_point.h"
#include "nn/rms_norm.h"

namespace tessera {

namespace {

using Reset = std::function<void()>;

template <class Impl>
bool find_reset(torch::nn::Module& module, Reset& reset) {
  auto* const impl = dynamic_cast<Impl*>(&module);
  if (impl != nullptr) {
    reset = [impl] { impl->reset_parameters(); };
  }
  return impl != nullptr;
}

template <class... Impls>
Reset find_any(torch::nn::Module& module) {
  Reset reset;
  (find_reset<Impls>(module, reset) || ...);
  return reset;
}

/// Resets a table like its own function, which writes to a view of the padding row; that may be on another rank.
template <class Impl>
bool find_table(torch::nn::Module& module, bool has_padding_row, Reset& reset) {
  auto* const impl = dynamic_cast<Impl*>(&module);
  if (impl != nullptr) {
    reset = [impl, has_padding_row] {
      auto& weight = impl->weight;
      torch::nn::init::normal_(weight);
      if (const auto row = impl->options.padding_idx(); row && has_padding_row) {
        const at::NoGradGuard no_grad;
        weight.index_fill_(0, weight.new_full({1}, *row, at::kLong), 0);
      }
    };
  }
  return impl != nullptr;
}

/// Returns an empty function if the type has none.
Reset select_reset(torch::nn::Module& module) {
  using namespace torch::nn;  // NOLINT: a list of its types
  Reset table;
  if (find_table<EmbeddingImpl>(module, /*has_padding_row=*/true, table) ||
      find_table<EmbeddingBagImpl>(module, /*has_padding_row=*/false, table)) {  // libtorch overwrites the row
    return table;
  }
  return find_any<ResettableParameters, LinearImpl, BilinearImpl, LayerNormImpl, GroupNormImpl,
                  tessera::nn::RMSNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl,
                  InstanceNorm2dImpl, InstanceNorm3dImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
                  ConvTranspose2dImpl, ConvTranspose3dImpl, RNNImpl, LSTMImpl, GRUImpl, RNNCellImpl, LSTMCellImpl,
                  GRUCellImpl>(module);
}

void check_memory(const std::string& path, const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  for (const auto& item : tensors) {
    TESSERA_CHECK(StateError, !item.value().defined() || !item.value().is_meta(),
                  "reset_parameters: '{}{}{}' is on the meta device; call to_empty(model, device) first", path,
                  path.empty() ? "" : ".", item.key());
  }
}

struct Resets {
  std::vector<Reset> all = {};
  std::set<const torch::nn::Module*> seen = {};
};

/// Collects children first. A module registered under two names was built once.
void collect(torch::nn::Module& module, const std::string& path, Resets& resets) {
  if (!resets.seen.insert(&module).second) {
    return;
  }
  const auto params = module.named_parameters(/*recurse=*/false);
  const auto buffers = module.named_buffers(/*recurse=*/false);
  check_memory(path, params);
  check_memory(path, buffers);
  auto reset = select_reset(module);
  const auto* first = !params.is_empty() ? &params.front() : !buffers.is_empty() ? &buffers.front() : nullptr;
  TESSERA_CHECK(NotImplementedError, reset || first == nullptr,
                "reset_parameters: {} at '{}' has '{}' and no reset_parameters() that is known here; derive it from "
                "ResettableParameters",
                module_type_name(module), path, first ? first->key() : "");
  for (const auto& child : module.named_children()) {
    collect(*child.value(), path.empty() ? child.key() : path + "." + child.key(), resets);
  }
  if (reset) {
    resets.all.push_back(std::move(reset));
  }
}

}  // namespace

void reset_parameters(ModuleRef module) {
  Resets resets;
  collect(*module, "", resets);
  for (const auto& reset : resets.all) {
    reset();
  }
}

}  // namespace tessera
