#include "dtensor/factories.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linspace.h>
#include <c10/core/DefaultDtype.h>

#include "base/error.h"
#include "dtensor/local/gather_full.h"
#include "dtensor/propagation/fill_check.h"

namespace tessera {

namespace {

void check_defined(const DeviceMesh& mesh, const char* where) {
  TESSERA_CHECK(ValueError, mesh.defined(), "{}: the mesh is empty; make one with init_device_mesh", where);
}

Placements factory_placements(Placements placements, int64_t ndim, const DeviceMesh& mesh, const char* where) {
  check_defined(mesh, where);
  if (placements.empty()) {
    placements = Placements(static_cast<size_t>(mesh.ndim()), Replicate());
  }
  auto result = normalized(std::move(placements), ndim, mesh.ndim(), where);
  for (const auto& placement : result) {
    TESSERA_CHECK(ValueError, !placement.is_partial(),
                  "{}: {}; a new tensor has no pending reduction. Use Shard or Replicate, or redistribute() to Partial",
                  where, to_string(result));
  }
  return result;
}

at::TensorOptions local_options(at::TensorOptions options, const DeviceMesh& mesh, const char* where) {
  check_defined(mesh, where);
  TESSERA_CHECK(ValueError, !options.has_device() || options.device().type() == mesh.device_type(),
                "{}: device {} for a tensor on {}; leave the device out", where, options.device().str(), mesh);
  const auto format = options.memory_format_opt().value_or(at::MemoryFormat::Contiguous);
  TESSERA_CHECK(ValueError, options.layout() == at::kStrided && format == at::MemoryFormat::Contiguous,
                "{}: layout and memory format of {}; a new DTensor is strided and contiguous. Leave both out, and "
                "convert what was made",
                where, c10::str(options));
  return options.device(mesh.device_type()).requires_grad(false);
}

/// Makes a DTensor; `fill` writes the local tensor.
template <class Fill>
at::Tensor make(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements, const at::TensorOptions& options,
                const char* where, Fill fill) {
  auto target = factory_placements(std::move(placements), static_cast<int64_t>(sizes.size()), mesh, where);
  const auto local = local_options(options, mesh, where);
  const auto dtype = c10::typeMetaToScalarType(local.has_dtype() ? local.dtype() : c10::get_default_dtype());
  const auto spec = DTensorSpec::make(mesh, std::move(target), TensorMeta::contiguous(sizes, dtype));
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto part = at::empty(spec->local_sizes(), local);
    fill(part);
    result = wrap_local(std::move(part), spec);
  }
  result.set_requires_grad(options.requires_grad());
  return result;
}

/// Returns this rank's shard of a tensor that every rank has made.
at::Tensor shard_whole(const at::Tensor& whole, const DeviceMesh& mesh, Placements placements,
                       const at::TensorOptions& options, const char* where) {
  const auto spec = DTensorSpec::make(mesh, factory_placements(std::move(placements), whole.dim(), mesh, where),
                                      TensorMeta::contiguous(whole.sizes(), whole.scalar_type()));
  auto result = wrap_local(local_shard_of(whole, *spec), spec);
  result.set_requires_grad(options.requires_grad());
  return result;
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements, at::TensorOptions options) {
  return make(sizes, mesh, std::move(placements), options, "empty", [](at::Tensor&) {});
}

at::Tensor zeros(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements, at::TensorOptions options) {
  return make(sizes, mesh, std::move(placements), options, "zeros", [](at::Tensor& part) { part.zero_(); });
}

at::Tensor ones(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements, at::TensorOptions options) {
  return make(sizes, mesh, std::move(placements), options, "ones", [](at::Tensor& part) { part.fill_(1); });
}

at::Tensor full(at::IntArrayRef sizes, const at::Scalar& value, const DeviceMesh& mesh, Placements placements,
                at::TensorOptions options) {
  if (!options.has_dtype() && !value.isFloatingPoint()) {  // like at::full
    options =
        options.dtype(value.isComplex() ? c10::toComplexType(c10::get_default_dtype_as_scalartype()) : value.type());
  }
  return make(sizes, mesh, std::move(placements), options, "full", [&](at::Tensor& part) {
    check_fill(part, c10::multiply_integers(sizes), value);
    part.fill_(value);
  });
}

at::Tensor rand(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements, at::TensorOptions options) {
  auto result = empty(sizes, mesh, std::move(placements), options.requires_grad(false));
  result.uniform_();
  return result.set_requires_grad(options.requires_grad());
}

at::Tensor randn(at::IntArrayRef sizes, const DeviceMesh& mesh, Placements placements, at::TensorOptions options) {
  auto result = empty(sizes, mesh, std::move(placements), options.requires_grad(false));
  result.normal_();
  return result.set_requires_grad(options.requires_grad());
}

at::Tensor arange(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step, const DeviceMesh& mesh,
                  Placements placements, at::TensorOptions options) {
  const auto whole = at::arange(start, end, step, local_options(options, mesh, "arange"));
  return shard_whole(whole, mesh, std::move(placements), options, "arange");
}

at::Tensor linspace(const at::Scalar& start, const at::Scalar& end, int64_t steps, const DeviceMesh& mesh,
                    Placements placements, at::TensorOptions options) {
  const auto whole = at::linspace(start, end, steps, local_options(options, mesh, "linspace"));
  return shard_whole(whole, mesh, std::move(placements), options, "linspace");
}

}  // namespace tessera
