#include "dtensor/local/dtensor_impl.h"

#include <fmt/ranges.h>

#include "base/error.h"

namespace tessera {

namespace {

/// Only provides access to protected members of TensorImpl, so copies made by shallow_copy_and_detach are equivalent.
class DTensorImpl : public c10::TensorImpl {
 public:
  DTensorImpl(c10::Storage&& storage, caffe2::TypeMeta dtype, c10::DeviceType device)
      : c10::TensorImpl(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype) {
    // Autocast follows the backend bit, so that a DTensor is cast like its real device. PrivateUse1's autocast key is
    // also set, for ImplicitReplication (implicit_replication.h).
    key_set_ =
        key_set_.add(device == c10::DeviceType::CUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU);
  }

  /// Like set_backend_meta() of a new tensor, whose make_unique() clears an ExtraMeta completely before constructing
  /// it.
  void set_meta(c10::intrusive_ptr<c10::BackendMeta> meta) {
    extra_meta_.reset(new c10::ExtraMeta);  // NOLINT(modernize-make-unique): see above
    extra_meta_->backend_meta_ = std::move(meta);
  }
};

c10::Storage make_storage_without_data(c10::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device), nullptr, false);
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "a DTensor has no data pointer of its own; take to_local() or full_tensor() first. To print, "
      "std::cout << describe(x) (dtensor/visualize_sharding.h), which sends nothing, or full_tensor(x), taken on every "
      "rank. In x.index_put_(indices, value), where libtorch compares the memory of x and of a value without dims, "
      "pass "
      "value.item() or a DTensor, or call at::index_put_(x, indices, value). To save, dcp::save "
      "(checkpoint/checkpoint.h) writes whole models, which load under any layout; torch::save of a "
      "SavedDTensor{tensor} writes this rank's part of one");
  return storage;
}

/// Empty storage shared by all DTensors that a thread makes on a device, because making one costs as much as the rest
/// of wrapping.
const c10::Storage& storage_without_data(c10::Device device) {
  thread_local c10::Storage last = make_storage_without_data(device);
  if (last.device() != device) {
    last = make_storage_without_data(device);
  }
  return last;
}

}  // namespace

const SpecPtr& dtensor_spec(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  TESSERA_CHECK(ValueError, meta != nullptr, "{} is not a DTensor; make one with distribute_tensor or from_local{}",
                tensor.defined() ? to_string(TensorMeta::of(tensor)) : "an undefined tensor",
                tensor.defined() ? ". A parameter of fully_shard is plain between forward and backward: use it as it "
                                   "is, or call fsdp(module).reshard() first"
                                 : "");
  return meta->spec;
}

bool has_own_local_memory(const at::Tensor& tensor) {
  const auto meta = tensor.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr();
  const size_t owners = meta.use_count() - 1;  // without this one; detached copies share it
  const at::Tensor& local = dtensor_meta(tensor)->local;
  return owners == 1 && local.use_count() == 1 && local.has_storage() && local.storage().use_count() == 1;
}

void check_not_stale(const DTensorMeta& meta, const char* where) {
  TESSERA_CHECK(StateError, !meta.materialized_view.is_stale(),
                "{}: {} is a view whose data had to be moved, and the tensor that it views was written since, which it "
                "did not see. Take the view again, or redistribute() the tensor before the view so that the view cuts "
                "no shard",
                where, meta.spec->to_string());
}

at::Tensor wrap_local(at::Tensor local, SpecPtr spec, std::shared_ptr<const ParameterOrigin> origin,
                      MaterializedView materialized_view) {
  TESSERA_ASSERT(local.sizes() == spec->local_sizes() && local.scalar_type() == spec->dtype(),
                 "a local tensor {} for the spec {} whose local sizes are [{}]", to_string(TensorMeta::of(local)),
                 spec->to_string(), fmt::join(spec->local_sizes(), ", "));
  const auto device = local.device();
  auto impl =
      c10::make_intrusive<DTensorImpl>(c10::Storage(storage_without_data(device)), local.dtype(), device.type());
  impl->set_sizes_and_strides(spec->sizes(), spec->strides());
  impl->set_meta(c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec), std::move(origin),
                                                  std::move(materialized_view)));
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(impl.release()));
}

}  // namespace tessera
