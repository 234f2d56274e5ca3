#include "examples/train_gpt/text_sample.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <torch/utils.h>

#include <algorithm>
#include <vector>

namespace tessera::examples {

std::string sample_text(Gpt& model, const SampleOptions& options) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const auto context = static_cast<size_t>(model->config.context);
  std::vector<int64_t> bytes(options.prompt.size());
  std::transform(options.prompt.begin(), options.prompt.end(), bytes.begin(),
                 [](char c) { return static_cast<unsigned char>(c); });
  std::string text;
  for (int64_t i = 0; i < options.bytes; ++i) {
    const size_t seen = std::min(bytes.size(), context);
    const at::Tensor tokens = at::tensor(at::ArrayRef<int64_t>(bytes).slice(bytes.size() - seen, seen)).unsqueeze(0);
    const at::Tensor logits = model(tokens.to(at::Device(options.device)))[0][-1].to(at::kCPU, at::kFloat);
    const at::Tensor next = at::softmax(logits / options.temperature, 0).multinomial(1, false, generator);
    bytes.push_back(next.item<int64_t>());
    text.push_back(static_cast<char>(bytes.back()));
  }
  return text;
}

std::string printable(const std::string& text) {
  std::string result;
  for (const char c : text) {
    const bool plain = (c >= ' ' && c <= '~') || c == '\n' || c == '\t';
    result.push_back(plain ? c : '?');
  }
  return result;
}

}  // namespace tessera::examples
