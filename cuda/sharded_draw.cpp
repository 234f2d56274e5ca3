#include "cuda/sharded_draw.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/detail/AcceleratorHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <tuple>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/draw_kernels.h"
#include "cuda/draw_table.h"

namespace tessera::cuda {

namespace {

std::optional<DrawDtype> draw_dtype(at::ScalarType dtype, Distribution distribution) {
  switch (dtype) {
    case at::kFloat:
      return DrawDtype::Float32;
    case at::kBFloat16:
      return DrawDtype::BFloat16;
    case at::kHalf:
      return DrawDtype::Float16;
    case at::kDouble:
      return DrawDtype::Float64;
    case at::kBool:
      return distribution == Distribution::Bernoulli ? std::optional(DrawDtype::Bool) : std::nullopt;
    default:
      return std::nullopt;
  }
}

GpuSize current_gpu_size() {
  const cudaDeviceProp* const properties = at::cuda::getCurrentDeviceProperties();
  return {.multiprocessors = properties->multiProcessorCount, .threads_each = properties->maxThreadsPerMultiProcessor};
}

/// As draw_shard, on the current GPU, whatever ATen does.
bool draw(const at::Tensor& local, const ShardOfWhole& shard, const DrawParameters& parameters, DrawDtype dtype,
          at::Generator& generator) {
  const GpuSize gpu = current_gpu_size();
  DrawSource source{.item_bytes = static_cast<int64_t>(local.element_size()), .width = draw_width(dtype)};
  std::optional<DrawTable> table;
  {
    const std::lock_guard lock(generator.mutex());
    source.seed = generator.current_seed();
    source.offset = generator.get_offset();
    table = draw_table(shard, gpu, source);
    if (!table) {
      return false;
    }
    generator.set_offset(offset_after(shard.whole_numel, gpu, source));
  }
  check_cuda(launch_draw(*table, dtype, parameters, local.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()),
             "draw_shard");
  return true;
}

at::Tensor drawn_by_aten(const at::Tensor& tensor, const DrawParameters& parameters, const at::Generator& generator) {
  switch (parameters.distribution) {
    case Distribution::Normal:
      return tensor.normal_(parameters.a, parameters.b, generator);
    case Distribution::Uniform:
      return tensor.uniform_(parameters.a, parameters.b, generator);
    case Distribution::Bernoulli:
      return tensor.bernoulli_(parameters.a, generator);
  }
  TESSERA_ASSERT(false, "distribution number {}", static_cast<int>(parameters.distribution));
}

DrawParameters make_probe(Distribution distribution) {
  switch (distribution) {
    case Distribution::Normal:
      return {distribution, 0.5, 2};
    case Distribution::Uniform:
      return {distribution, -1, 2};
    case Distribution::Bernoulli:
      return {distribution, 0.3};
  }
  TESSERA_ASSERT(false, "distribution number {}", static_cast<int>(distribution));
}

/// Over two rounds of the largest grid and a part of one, from a generator that has given numbers before.
bool draws_as_aten(Distribution distribution, DrawDtype dtype, const at::TensorOptions& options) {
  const GpuSize gpu = current_gpu_size();
  const int64_t numel = 2 * draw_width(dtype) * gpu.multiprocessors * gpu.threads_each + 77;
  const DrawParameters probe = make_probe(distribution);
  auto generator =
      at::globalContext().getAcceleratorHooksInterface(at::kCUDA).getNewGenerator(options.device().index());
  const auto start = [&] {
    generator.set_current_seed(12345);
    generator.set_offset(8);
  };
  start();
  const at::Tensor expected = drawn_by_aten(at::empty({numel}, options), probe, generator);
  const uint64_t offset = generator.get_offset();
  start();
  const at::Tensor drawn = at::empty({numel}, options);
  const ShardOfWhole all{.sizes = {numel}, .whole_strides = {1}, .local_strides = {1}, .whole_numel = numel};
  return draw(drawn, all, probe, dtype, generator) && generator.get_offset() == offset && drawn.equal(expected);
}

bool was_seen_to_draw_as_aten(Distribution distribution, DrawDtype dtype, const at::TensorOptions& options) {
  static std::mutex mutex;
  static std::map<std::tuple<c10::DeviceIndex, DrawDtype, Distribution>, bool> seen;
  const std::lock_guard lock(mutex);
  const std::tuple key(options.device().index(), dtype, distribution);
  auto place = seen.find(key);
  if (place == seen.end()) {
    place = seen.emplace(key, draws_as_aten(distribution, dtype, options)).first;  // one that throws is made again
    if (!place->second) {
      TORCH_WARN("tessera: this libtorch draws random numbers of ",
                 c10::toString(c10::typeMetaToScalarType(options.dtype())), " on ", options.device().str(),
                 " in another way than cuda/draw_tile.h; DTensors draw them whole on each rank, "
                 "which gives the same numbers and takes memory of the global tensor");
    }
  }
  return place->second;
}

}  // namespace

bool draw_shard(const at::Tensor& local, const ShardOfWhole& shard, const DrawParameters& parameters,
                at::Generator generator) {
  const auto dtype = draw_dtype(local.scalar_type(), parameters.distribution);
  if (!dtype) {
    return false;
  }
  const c10::cuda::CUDAGuard guard(local.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  return was_seen_to_draw_as_aten(parameters.distribution, *dtype,
                                  at::dtype(local.scalar_type()).device(local.device())) &&
         draw(local, shard, parameters, *dtype, generator);
}

}  // namespace tessera::cuda
