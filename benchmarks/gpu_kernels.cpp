// Memory bandwidth that the kernels of cuda/ reach on a GPU, compared with ATen's multi-tensor ops, on the layout of a
// transformer's unit: 12 parameters, 85 M elements, 8 ranks. Only bytes that must be read and written once count.
// Without a GPU it says so and measures nothing.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "benchmarks/measure.h"
#include "cuda/device.h"
#include "cuda/multi_copy.h"
#include "cuda/multi_norm.h"
#include "cuda/sharded_draw.h"

namespace tessera {
namespace {

constexpr int64_t kRanks = 8;
constexpr int64_t kSteps = 10;

class Event {
 public:
  Event() { cuda::check_cuda(cudaEventCreate(&event_), "gpu_kernels"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record() { cuda::check_cuda(cudaEventRecord(event_, c10::cuda::getCurrentCUDAStream()), "gpu_kernels"); }
  double microseconds_since(const Event& begin) {
    float milliseconds = 0;
    cuda::check_cuda(cudaEventSynchronize(event_), "gpu_kernels");
    cuda::check_cuda(cudaEventElapsedTime(&milliseconds, begin.event_, event_), "gpu_kernels");
    return milliseconds * 1e3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Returns the time of one call on the GPU: the fastest of `rounds` rounds of kSteps calls.
double gpu_us(const std::function<void()>& call, int rounds) {
  double best = 0;
  for (int round = -1; round < rounds; ++round) {
    Event begin, end;
    begin.record();
    for (int64_t step = 0; step < kSteps; ++step) {
      call();
    }
    end.record();
    const double us = end.microseconds_since(begin) / kSteps;
    best = round <= 0 ? us : std::min(best, us);
  }
  return best;
}

/// The unit's parameters and the buffer of all ranks' shards, rank after rank.
struct Unit {
  std::vector<at::Tensor> params;
  std::vector<int64_t> offsets;  // in a rank's shard
  int64_t shard_numel = 0;
  at::Tensor flat;
};

Unit make_unit(at::ScalarType param_dtype, at::ScalarType flat_dtype) {
  Unit unit;
  const int64_t dim = 2560;
  for (const int64_t rows : {int64_t{1}, int64_t{1}, 3 * dim, int64_t{1}, dim, int64_t{1}, int64_t{1}, int64_t{1},
                             4 * dim, int64_t{4}, 4 * dim, int64_t{1}}) {
    unit.params.push_back(at::randn({rows, dim}, at::TensorOptions(at::kCUDA)).to(param_dtype));
    unit.offsets.push_back(unit.shard_numel);
    unit.shard_numel += rows * dim / kRanks;
  }
  unit.flat = at::randn({kRanks * unit.shard_numel}, at::TensorOptions(at::kCUDA)).to(flat_dtype);
  return unit;
}

void print_bandwidth(const std::string& name, double bytes, const std::function<void()>& ours,
                     const std::function<void()>& aten, const BenchmarkOptions& options) {
  const double us = gpu_us(ours, options.rounds), aten_us = gpu_us(aten, options.rounds);
  print_result(name + "_GB_per_s", bytes / us * 1e-3, "GB/s", {{name + "_GB_per_s", bytes / aten_us * 1e-3}},
               options.json);
  const auto wait = [] { cuda::check_cuda(cudaDeviceSynchronize(), "gpu_kernels"); };
  const auto host_us = microseconds({wait, ours, wait, aten}, wall_us, options.rounds, /*steps=*/1);
  print_result(name + "_host_us", host_us[1], "us", {{name + "_host_us", host_us[3]}}, options.json);
}

void measure_copies(bool out, const BenchmarkOptions& options) {
  const Unit unit = make_unit(out ? at::kBFloat16 : at::kFloat, at::kBFloat16);
  const at::ScalarType param_dtype = unit.params[0].scalar_type();
  const auto ours = [&] {
    cuda::MultiCopy copy(out ? param_dtype : at::kBFloat16, out ? at::kBFloat16 : param_dtype);
    for (size_t i = 0; i < unit.params.size(); ++i) {
      const int64_t chunk = unit.params[i].numel() / kRanks;
      const CopyShape shape{.to_offset = out ? 0 : unit.offsets[i],
                            .to_stride = out ? chunk : unit.shard_numel,
                            .from_offset = out ? unit.offsets[i] : 0,
                            .from_stride = out ? unit.shard_numel : chunk,
                            .rows = kRanks,
                            .cols = chunk};
      out ? copy.add(unit.params[i], unit.flat, shape) : copy.add(unit.flat, unit.params[i], shape);
    }
    copy.run();
  };
  std::vector<at::Tensor> params, parts;
  for (size_t i = 0; i < unit.params.size(); ++i) {
    const int64_t chunk = unit.params[i].numel() / kRanks;
    params.push_back(unit.params[i].view({kRanks, chunk}));
    parts.push_back(unit.flat.as_strided({kRanks, chunk}, {unit.shard_numel, 1}, unit.offsets[i]));
  }
  const auto aten = [&] { at::_foreach_copy_(out ? params : parts, out ? parts : params, /*non_blocking=*/true); };
  const double bytes = static_cast<double>(unit.flat.nbytes()) +
                       static_cast<double>(unit.flat.numel()) * static_cast<double>(unit.params[0].element_size());
  print_bandwidth(out ? "copy_out_bf16" : "copy_in_fp32_to_bf16", bytes, ours, aten, options);
}

/// Measures the bandwidth of reading and writing memory, as a reference for the other lines.
void measure_memory(const BenchmarkOptions& options) {
  const at::Tensor from = at::empty({int64_t{1} << 30}, at::TensorOptions(at::kCUDA).dtype(at::kByte));
  const at::Tensor to = at::empty_like(from);
  const double us = gpu_us([&] { to.copy_(from); }, options.rounds);
  print_result("device_copy_GB_per_s", 2.0 * static_cast<double>(from.nbytes()) / us * 1e-3, "GB/s", {}, options.json);
}

void measure_norm(const BenchmarkOptions& options) {
  const Unit unit = make_unit(at::kFloat, at::kBFloat16);
  const auto ours = [&] { cuda::multi_tensor_norm(unit.params, cuda::NormKind::L2); };
  const auto aten = [&] { at::linalg_vector_norm(at::stack(at::_foreach_norm(unit.params, 2)), 2); };
  print_bandwidth("norm_fp32", static_cast<double>(unit.flat.numel()) * sizeof(float), ours, aten, options);
}

/// Measures the rate of drawing one of 8 ranks' rows of an embedding [32768, 4096], compared with the whole embedding.
void measure_draw(const BenchmarkOptions& options) {
  const int64_t rows = 32768, dim = 4096;
  const auto cuda = at::TensorOptions(at::kCUDA).dtype(at::kBFloat16);
  const at::Tensor whole = at::empty({rows, dim}, cuda), local = at::empty({rows / kRanks, dim}, cuda);
  const ShardOfWhole shard{.sizes = local.sizes().vec(),
                           .whole_strides = whole.strides().vec(),
                           .local_strides = local.strides().vec(),
                           .whole_offset = 3 * local.numel(),
                           .whole_numel = whole.numel()};
  auto generator = at::globalContext().defaultGenerator(whole.device());
  const auto ours = [&] {
    TESSERA_CHECK(StateError, cuda::draw_shard(local, shard, {Distribution::Normal, 0, 0.02}, generator),
                  "gpu_kernels: draw_shard does not draw as this libtorch does");
  };
  const auto aten = [&] {
    whole.normal_(0, 0.02, generator);
    local.copy_(whole.narrow(0, 3 * rows / kRanks, rows / kRanks));
  };
  ours();
  print_bandwidth("normal_bf16_shard_of_8", static_cast<double>(local.nbytes()), ours, aten, options);
}

void run(const BenchmarkOptions& options) {
  if (cuda::visible_devices() == 0) {
    std::printf("skipped: %s\n", cuda::no_device_message().c_str());
    return;
  }
  measure_memory(options);
  measure_copies(/*out=*/true, options);
  measure_copies(/*out=*/false, options);
  measure_norm(options);
  measure_draw(options);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(argc, argv,
                                 {.name = "gpu_kernels",
                                  .description = "Memory bandwidth of the CUDA kernels, beside ATen's.",
                                  .run = tessera::run});
}
