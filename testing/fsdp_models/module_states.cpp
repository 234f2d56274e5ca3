#include "testing/fsdp_models/module_states.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "comm/collectives.h"
#include "device_mesh/rank_agreement.h"
#include "dtensor/dtensor.h"
#include "fully_shard/composable_apis.h"
#include "testing/expect.h"
#include "testing/tensor_matchers.h"

namespace tessera::testing {

namespace {

using Entry = std::pair<std::string, at::Tensor>;

at::Tensor whole(const at::Tensor& tensor) {
  return is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor.detach();
}

std::vector<Entry> entries(const torch::nn::Module& module) {
  std::vector<Entry> result;
  for (const auto& item : module.named_parameters()) {
    result.emplace_back(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) {
    result.emplace_back(item.key(), item.value());
  }
  return result;
}

std::string header(const std::vector<Entry>& entries) {
  std::string text;
  for (const auto& [name, tensor] : entries) {
    text += fmt::format("{} {} {}\n", name, static_cast<int>(tensor.scalar_type()), fmt::join(tensor.sizes(), " "));
  }
  return text;
}

/// Parses the lines of a header into tensors without contents.
std::vector<Entry> empty_entries(const std::string& text) {
  std::vector<Entry> result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    int dtype = 0;
    words >> name >> dtype;
    std::vector<int64_t> sizes;
    for (int64_t size = 0; words >> size;) {
      sizes.push_back(size);
    }
    result.emplace_back(name, at::empty(sizes, static_cast<at::ScalarType>(dtype)));
  }
  return result;
}

}  // namespace

void assert_module_states(const torch::nn::Module& module, const DeviceMesh& mesh, const AssertEqual& assert_equal) {
  const at::NoGradGuard no_grad;
  auto own = entries(module);
  for (auto& [name, tensor] : own) {
    tensor = whole(tensor).cpu().contiguous();
  }
  const auto headers = all_gather_strings(mesh, header(own));
  for (size_t rank = 1; rank < headers.size(); ++rank) {
    TESSERA_CHECK(ExpectationError, headers[rank] == headers[0], "assert_module_states: rank 0 has\n{}rank {} has\n{}",
                  headers[0], rank, headers[rank]);
  }
  const auto ranks = static_cast<int64_t>(headers.size());
  for (const auto& [name, tensor] : own) {
    const auto all = at::empty({ranks * tensor.numel()}, tensor.options());
    all_gather(all, tensor.reshape({-1}), mesh.group());
    for (int64_t rank = 1; rank < ranks; ++rank) {
      const auto part = [&](int64_t i) {
        return all.narrow(0, i * tensor.numel(), tensor.numel()).view(tensor.sizes());
      };
      assert_equal ? assert_equal(part(0), part(rank)) : expect_bit_equal(part(rank), part(0));
    }
  }
}

void zero_model(torch::nn::Module& module, ZeroModelOptions options) {
  const at::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    parameter.zero_();
  }
  if (options.zero_buffers) {
    for (auto& buffer : module.buffers()) {
      buffer.zero_();
    }
  }
}

StateDict get_state_dict(const torch::nn::Module& module, GetStateDictOptions options) {
  const at::NoGradGuard no_grad;
  StateDict state;
  for (const auto& [name, tensor] : entries(module)) {
    auto entry = tensor.detach().to(options.cpu_offload ? at::Device(at::kCPU) : options.device);
    state.insert(name, options.half && entry.is_floating_point() ? entry.to(at::kHalf) : entry);
  }
  return state;
}

StateDict clone_state_dict(const StateDict& state) {
  const at::NoGradGuard no_grad;
  StateDict copy;
  for (const auto& item : state) {
    copy.insert(item.key(), item.value().clone());
  }
  return copy;
}

void load_state_dict(torch::nn::Module& module, const StateDict& state) {
  const at::NoGradGuard no_grad;
  auto own = entries(module);
  TESSERA_CHECK(KeyError, own.size() == state.size(), "load_state_dict: {} entries for a module of {}", state.size(),
                own.size());
  for (auto& [name, tensor] : own) {
    const auto* value = state.find(name);
    TESSERA_CHECK(KeyError, value != nullptr, "load_state_dict: no entry '{}'", name);
    tensor.copy_(*value);
  }
}

StateDict broadcast_state_dict(const StateDict& state, const DeviceMesh& mesh, at::Device device) {
  const at::NoGradGuard no_grad;
  const bool is_source = mesh.local_rank() == 0;
  std::vector<Entry> own;
  std::string fault;
  for (const auto& item : state) {
    if (is_source && is_dtensor(item.value())) {
      fault = fmt::format("!entry '{}' is a DTensor", item.key());
    } else if (is_source) {
      own.emplace_back(item.key(), item.value().detach().cpu().contiguous());
    }
  }
  const auto text = all_gather_strings(mesh, !fault.empty() ? fault : header(own)).at(0);
  TESSERA_CHECK(ValueError, text.empty() || text[0] != '!', "broadcast_state_dict: {}; give full tensors",
                text.substr(1));
  if (!is_source) {
    own = empty_entries(text);
  }
  StateDict result;
  for (const auto& [name, tensor] : own) {
    broadcast(tensor, 0, mesh.group());
    result.insert(name, tensor.to(device));
  }
  return result;
}

std::vector<at::Tensor> get_full_params(torch::nn::Module& module, bool recurse) {
  const at::NoGradGuard no_grad;
  std::unordered_set<c10::TensorImpl*> own;
  for (const auto* managed : managed_modules(module)) {
    for (const auto& parameter : managed->parameters(/*recurse=*/false)) {
      own.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::unordered_map<c10::TensorImpl*, at::Tensor> copies;
  std::vector<at::Tensor> result;
  for (const auto& parameter : module.parameters()) {
    auto& copy = copies[parameter.unsafeGetTensorImpl()];
    if (!copy.defined()) {
      const bool gathers = recurse || own.count(parameter.unsafeGetTensorImpl()) != 0;
      copy = (gathers ? whole(parameter) : parameter.detach()).clone();
    }
    result.push_back(copy);
  }
  return result;
}

std::string subtest_name(const std::map<std::string, std::string>& mapping,
                         const std::vector<std::optional<std::string>>& arguments) {
  std::vector<std::string> words;
  for (const auto& argument : arguments) {
    const auto found = argument ? mapping.find(*argument) : mapping.end();
    TESSERA_CHECK(KeyError, !argument || found != mapping.end(), "subtest_name: '{}' is not in the mapping",
                  argument.value_or(""));
    words.push_back(argument ? found->second : "none");
  }
  return fmt::format("{}", fmt::join(words, "_"));
}

torch::nn::Module& move_to_device(torch::nn::Module& module, bool move, at::Device device) {
  if (move) {
    module.to(device);
  }
  return module;
}

torch::nn::Module& maybe_wrap_fsdp(torch::nn::Module& module, bool wrap, const FullyShardOptions& options) {
  if (wrap) {
    fully_shard(module, options);
  }
  return module;
}

}  // namespace tessera::testing
