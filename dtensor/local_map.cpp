#include "dtensor/local_map.h"

#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/error.h"
#include "comm/collectives.h"
#include "dtensor/local/from_local_checks.h"

namespace tessera {

namespace {

const DeviceMesh& mesh_of_inputs(const std::vector<at::Tensor>& inputs) {
  const DeviceMesh* mesh = nullptr;
  for (const auto& input : inputs) {
    if (is_dtensor(input)) {
      TESSERA_CHECK(ValueError, !mesh || *mesh == device_mesh(input),
                    "local_map: inputs lie on {} and {}; use one mesh", *mesh, device_mesh(input));
      mesh = &device_mesh(input);
    }
  }
  TESSERA_CHECK(ValueError, mesh != nullptr,
                "local_map: no input is a DTensor, so nothing says which mesh to use; make "
                "one with distribute_tensor");
  return *mesh;
}

template <class T>
std::optional<T> entry(const std::vector<std::optional<T>>& list, size_t index) {
  return list.empty() ? std::nullopt : list[index];
}

at::Tensor local_input(const at::Tensor& input, size_t index, const LocalMapOptions& options) {
  if (!is_dtensor(input)) {
    return input;
  }
  at::Tensor placed = input;
  if (const auto wanted = entry(options.in_placements, index)) {
    const auto target = normalized(*wanted, input.dim(), device_mesh(input).ndim(), "local_map(in_placements)");
    TESSERA_CHECK(ValueError, options.redistribute_inputs || placements(input) == target,
                  "local_map: input {} is {}, but in_placements say {}; redistribute() it, or set redistribute_inputs",
                  index, dtensor_spec(input)->to_string(), to_string(target));
    placed = redistribute(input, target);
  }
  const auto grad_placements = entry(options.in_grad_placements, index);
  return placed.is_same(input) ? to_local(input, grad_placements) : take_local(std::move(placed), grad_placements);
}

void check_counts(const LocalMapOptions& options, size_t inputs) {
  const auto fits = [&](size_t count) { return count == 0 || count == inputs; };
  TESSERA_CHECK(ValueError, fits(options.in_placements.size()) && fits(options.in_grad_placements.size()),
                "local_map: {} in_placements and {} in_grad_placements for {} inputs; give one an input or none",
                options.in_placements.size(), options.in_grad_placements.size(), inputs);
  TESSERA_CHECK(ValueError, options.out_shapes.empty() || options.out_shapes.size() == options.out_placements.size(),
                "local_map: {} out_shapes for {} out_placements; give one a result or none", options.out_shapes.size(),
                options.out_placements.size());
}

}  // namespace

namespace {

/// gather_shape for tensors with equal numbers of dims on all ranks.
std::vector<int64_t> add_up_sizes(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  auto sizes = at::tensor(local.sizes(), at::kLong).to(at::Device(mesh.device_type()));
  const auto cuts = shard_order(placements);
  for (size_t i = cuts.size(); i-- > 0;) {  // inner axes first: their sum is the size that the outer one shards
    const auto axis = static_cast<int64_t>(cuts[i]);
    auto sum = sizes.clone();
    all_reduce(sum, ReduceOp::Sum, mesh.group(axis));
    const int64_t dim = placements[cuts[i]].dim();
    sizes[dim].copy_(sum[dim]);
  }
  const auto host = sizes.to(at::kCPU);
  return {host.data_ptr<int64_t>(), host.data_ptr<int64_t>() + host.numel()};
}

/// Checks that the function returns one tensor for each of out_placements: on every rank, unless `out_shapes` is given
/// and nothing is exchanged.
void check_results(const std::vector<at::Tensor>& results, const LocalMapOptions& options, const DeviceMesh& mesh) {
  const size_t wanted = options.out_placements.size();
  const auto undefined = std::ranges::find_if(results, [](const at::Tensor& result) { return !result.defined(); });
  const bool fits = results.size() == wanted && undefined == results.end();
  const bool fits_everywhere = options.out_shapes.empty() ? same_on_all_ranks({fits}, mesh) && fits : fits;
  TESSERA_CHECK(ValueError, results.size() == wanted,
                "local_map: the function returned {} tensors, but there are {} out_placements; give one a result",
                results.size(), wanted);
  TESSERA_CHECK(ValueError, undefined == results.end(),
                "local_map: result {} of the function is undefined; return a tensor, zeros say, on every rank",
                undefined - results.begin());
  TESSERA_CHECK(ValueError, fits_everywhere,
                "local_map: on another rank the function threw, or returned an undefined result, or not {} of them",
                wanted);
}

/// Calls the function. If it throws, the other ranks learn of it in check_results(), except for communication errors,
/// which they get themselves.
std::vector<at::Tensor> call(const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
                             const std::vector<at::Tensor>& locals, const LocalMapOptions& options,
                             const DeviceMesh& mesh) {
  try {
    return function(locals);
  } catch (const CommError&) {
    throw;
  } catch (...) {
    if (options.out_shapes.empty()) {
      const auto failure = std::current_exception();
      same_on_all_ranks({0}, mesh);
      std::rethrow_exception(failure);
    }
    throw;
  }
}

at::Tensor global_result(const at::Tensor& local, size_t index, const LocalMapOptions& options,
                         const DeviceMesh& mesh) {
  const bool is_sized = !options.out_shapes.empty();
  if (!is_sized) {
    check_kind_across_ranks(local, mesh, "local_map");  // before code that depends on the number of dims
  }
  const auto target = normalized(options.out_placements[index], local.dim(), mesh.ndim(), "local_map(out_placements)");
  const auto shape = is_sized ? options.out_shapes[index] : add_up_sizes(local, mesh, target);
  TESSERA_CHECK(ValueError, std::ssize(shape) == local.dim(),
                "local_map: result {} of the function has {} dims, and options.out_shapes has [{}] for it", index,
                local.dim(), fmt::join(shape, ", "));
  const auto spec = DTensorSpec::make(mesh, target, TensorMeta::contiguous(shape, local.scalar_type()));
  if (!is_sized) {
    check_sizes_across_ranks(
        local, shape, *spec,
        {.where = "local_map", .remedy = "Check options.out_placements, or pass options.out_shapes"});
  }
  TESSERA_CHECK(ValueError, local.sizes() == spec->local_sizes(),
                "local_map: result {} of the function is [{}] on this rank, which does not fit {}, as "
                "options.out_placements and options.out_shapes say",
                index, fmt::join(local.sizes(), ", "), spec->to_string());
  return from_local(local, mesh, target, {.shape = shape});
}

}  // namespace

std::vector<int64_t> gather_shape(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements) {
  check_kind_across_ranks(local, mesh, "gather_shape");
  return add_up_sizes(local, mesh, placements);
}

std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& inputs, const LocalMapOptions& options) {
  const auto mesh = mesh_of_inputs(inputs);
  check_counts(options, inputs.size());
  std::vector<at::Tensor> locals;
  for (size_t i = 0; i < inputs.size(); ++i) {
    locals.push_back(local_input(inputs[i], i, options));
  }
  auto results = call(function, locals, options, mesh);
  check_results(results, options, mesh);
  for (size_t i = 0; i < results.size(); ++i) {
    results[i] = global_result(results[i], i, options, mesh);
  }
  return results;
}

}  // namespace tessera
