#include "dtensor/local/from_local_checks.h"

#include <ATen/ops/tensor.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "comm/collectives.h"

namespace tessera {

bool same_on_all_ranks(std::vector<int64_t> values, const DeviceMesh& mesh) {
  const size_t count = values.size();
  for (size_t i = 0; i < count; ++i) {
    values.push_back(-values[i]);
  }
  auto extremes = at::tensor(values, at::TensorOptions().dtype(at::kLong)).to(at::Device(mesh.device_type()));
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    all_reduce(extremes, ReduceOp::Max, mesh.group(axis));
  }
  return extremes.narrow(0, 0, static_cast<int64_t>(count))
      .neg()
      .equal(extremes.narrow(0, static_cast<int64_t>(count), static_cast<int64_t>(count)));
}

void check_kind_across_ranks(const at::Tensor& local, const DeviceMesh& mesh, const char* where) {
  TESSERA_CHECK(ValueError, same_on_all_ranks({local.dim(), static_cast<int64_t>(local.scalar_type())}, mesh),
                "{}: the ranks pass tensors of different dtypes or numbers of dims; this rank a {}", where,
                to_string(TensorMeta::of(local)));
}

void check_sizes_across_ranks(const at::Tensor& local, const std::vector<int64_t>& shape, const DTensorSpec& spec,
                              const SizedBy& by) {
  TESSERA_CHECK(ValueError, same_on_all_ranks(shape, spec.mesh()),
                "{}: the ranks make different global sizes of their local ones; this rank [{}] of [{}]. {}, the global "
                "sizes, the same on every rank",
                by.where, fmt::join(shape, ", "), fmt::join(local.sizes(), ", "), by.remedy);
  const bool fits = local.sizes() == spec.local_sizes();
  TESSERA_CHECK(ValueError, same_on_all_ranks({fits}, spec.mesh()) && fits,
                "{}: on some rank the local sizes do not fit {}; this rank has [{}] and needs [{}]. {}, the global "
                "sizes, and shards cut as torch.chunk cuts them",
                by.where, spec.to_string(), fmt::join(local.sizes(), ", "), fmt::join(spec.local_sizes(), ", "),
                by.remedy);
}

namespace {

/// Compares bits, so NaNs with the same bits are equal.
bool same_values(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().view({-1}).view(at::kByte);
  };
  return a.equal(b) || bytes(a).equal(bytes(b));
}

}  // namespace

void check_copies_across_ranks(const at::Tensor& local, const DTensorSpec& spec, const char* where) {
  for (int64_t axis = 0; axis < spec.mesh().ndim(); ++axis) {
    bool same = true;
    if (spec.placements()[static_cast<size_t>(axis)].is_replicate()) {
      const auto first = local.detach().clone(at::MemoryFormat::Contiguous);
      broadcast(first, 0, spec.mesh().group(axis));
      same = same_values(first, local.detach());
    }
    TESSERA_CHECK(ValueError, same_on_all_ranks({same}, spec.mesh()) && same,
                  "{}: placement Replicate() on axis {} of {}, but the ranks hold different values", where, axis,
                  spec.to_string());
  }
}

}  // namespace tessera
