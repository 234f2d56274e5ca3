// A transformer's fused ops compared with ATen's, on one thread.
//
//   <op>/<dtype>/forward_us, backward_us        the fused op (fused/)
//   <op>/<dtype>/forward_ratio, backward_ratio  that divided by the time of ATen's ops
//   <op>/<dtype>/kept_mib, aten_kept_mib        memory that forward leaves for backward, outputs included
//   decoder/Float/step_ms, step_ratio           forward and backward of a Llama of 4 layers, with its loss
//   decoder/<dtype>/peak_mib, aten_peak_mib     the most memory in them, without parameters
//
// Both alternate, and the fastest round counts. Tokens: 4 x 512, features: 768, of the MLP 2048, heads: 12.

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include "benchmarks/measure.h"
#include "fused/fused_ops.h"
#include "fused/gelu.h"
#include "fused/glu.h"
#include "fused/rms_norm.h"
#include "fused/rotary.h"
#include "models/decoder.h"
#include "testing/count_allocations.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr double kMiB = 1 << 20;

struct FusedCase {
  std::string name;
  std::vector<std::vector<int64_t>> sizes;  // of inputs, which all have gradients
  std::function<Tensors(const Tensors&)> call;
};

const std::vector<FusedCase>& fused_cases() {
  static const std::vector<FusedCase> cases{
      {"swiglu", {{4, 512, 2048}, {4, 512, 2048}}, [](const Tensors& x) -> Tensors { return {swiglu(x[0], x[1])}; }},
      {"tanh_geglu",
       {{4, 512, 2048}, {4, 512, 2048}},
       [](const Tensors& x) -> Tensors { return {tanh_geglu(x[0], x[1])}; }},
      {"tanh_gelu", {{4, 512, 2048}}, [](const Tensors& x) -> Tensors { return {tanh_gelu(x[0])}; }},
      {"rms_norm",
       {{4, 512, 768}, {768}},
       [](const Tensors& x) -> Tensors { return {rms_norm(x[0], x[1], {.eps = 1e-6})}; }},
      {"add_rms_norm",
       {{4, 512, 768}, {768}, {4, 512, 768}},
       [](const Tensors& x) -> Tensors {
         const auto result = add_rms_norm(x[0], x[2], x[1], {.eps = 1e-6});
         return {result.sum, result.normed};
       }},
      {"rotate_positions",
       {{4, 512, 12, 64}},
       [](const Tensors& x) -> Tensors {
         static const auto table = at::randn({512, 64});  // values do not matter
         const auto own = table.to(x[0].scalar_type());
         return {rotate_positions(x[0].transpose(1, 2), own, own)};
       }},
  };
  return cases;
}

/// One implementation of a case, with the inputs and gradients for backward.
class Way {
 public:
  Way(const FusedCase& test, at::ScalarType dtype, bool is_fused) : test_(test), is_fused_(is_fused) {
    for (const auto& sizes : test.sizes) {
      inputs_.push_back(at::randn(sizes).to(dtype).set_requires_grad(true));
    }
    forward();
    for (const auto& output : outputs_) {
      grads_.push_back(at::randn(output.sizes()).to(dtype));
    }
  }

  void forward() {
    set_fused_ops(is_fused_);
    outputs_ = test_.call(inputs_);
  }
  void backward() { torch::autograd::grad(outputs_, inputs_, grads_, /*retain_graph=*/true); }
  /// Counts allocations below libtorch, because the process's memory includes memory that malloc keeps.
  double kept_mib() {
    outputs_.clear();
    testing::AllocationCounter counter;
    const testing::CountAllocations counting;
    const testing::CountingScope scope(counter);
    forward();
    const auto bytes = static_cast<double>(counter.bytes);
    outputs_.clear();
    return bytes / kMiB;
  }

 private:
  const FusedCase& test_;
  bool is_fused_;
  Tensors inputs_, outputs_, grads_;
};

void compare(const FusedCase& test, at::ScalarType dtype, const BenchmarkOptions& options) {
  Way fused(test, dtype, true), aten(test, dtype, false);
  const auto prefix = fmt::format("{}/{}/", test.name, c10::toString(dtype));
  const double kept = fused.kept_mib(), aten_kept = aten.kept_mib();
  fused.forward();
  aten.forward();
  const auto us = microseconds(
      {[&] { fused.forward(); }, [&] { aten.forward(); }, [&] { fused.backward(); }, [&] { aten.backward(); }}, wall_us,
      options.rounds, /*steps=*/2);
  print_result(prefix + "forward_us", us[0], "us", {}, options.json);
  print_result(prefix + "forward_ratio", us[0] / us[1], "x", {}, options.json);
  print_result(prefix + "backward_us", us[2], "us", {}, options.json);
  print_result(prefix + "backward_ratio", us[2] / us[3], "x", {}, options.json);
  print_result(prefix + "kept_mib", kept, "MiB", {}, options.json);
  print_result(prefix + "aten_kept_mib", aten_kept, "MiB", {}, options.json);
}

struct DecoderStep {
  models::Decoder model;
  at::Tensor ids = at::randint(4000, {4, 512}, at::kLong);

  explicit DecoderStep(at::ScalarType dtype)
      : model(models::DecoderConfig{.vocab_size = 4000,
                                    .hidden_size = 768,
                                    .intermediate_size = 2048,
                                    .num_hidden_layers = 4,
                                    .num_attention_heads = 12,
                                    .num_key_value_heads = 12,
                                    .head_dim = 64,
                                    .max_position_embeddings = 512,
                                    .attention_scale = 0.125}) {
    model->to(dtype);
  }
  void run(bool is_fused) {
    set_fused_ops(is_fused);
    model->zero_grad();
    model(ids, models::DecoderInputs{.labels = ids}).backward();
  }
  double peak_mib(bool is_fused) {
    testing::AllocationCounter counter;
    const testing::CountAllocations counting;
    const testing::CountingScope scope(counter);
    run(is_fused);
    model->zero_grad();
    return static_cast<double>(counter.peak) / kMiB;
  }
};

void compare_decoders(at::ScalarType dtype, const BenchmarkOptions& options) {
  DecoderStep step(dtype);
  const auto prefix = fmt::format("decoder/{}/", c10::toString(dtype));
  const double peak = step.peak_mib(true), aten_peak = step.peak_mib(false);
  if (dtype == at::kFloat) {  // products in bfloat16 take several times as long on most CPUs
    const auto us =
        microseconds({[&] { step.run(true); }, [&] { step.run(false); }}, wall_us, options.rounds, /*steps=*/1);
    print_result(prefix + "step_ms", us[0] / 1e3, "ms", {}, options.json);
    print_result(prefix + "step_ratio", us[0] / us[1], "x", {}, options.json);
  }
  print_result(prefix + "peak_mib", peak, "MiB", {}, options.json);
  print_result(prefix + "aten_peak_mib", aten_peak, "MiB", {}, options.json);
}

void run(const BenchmarkOptions& options) {
  for (const auto& test : fused_cases()) {
    compare(test, at::kFloat, options);
    compare(test, at::kBFloat16, options);
  }
  compare_decoders(at::kFloat, options);
  compare_decoders(at::kBFloat16, options);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(argc, argv,
                                 {.name = "fused_ops",
                                  .description = "A transformer's fused ops beside ATen's.",
                                  .rounds = 15,
                                  .run = tessera::run});
}
