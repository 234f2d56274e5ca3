#include "comm/call_checks.h"

#include <fmt/ranges.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/error.h"

namespace tessera::detail {

namespace {

/// Like is_dtensor() of dtensor, which is above this package: no other tensor has this dispatch key.
bool is_dtensor(const at::Tensor& tensor) {
  return tensor.key_set().has_backend(c10::BackendComponent::PrivateUse1Bit);
}

}  // namespace

void check_tensor(Collective kind, const char* role, const at::Tensor& tensor) {
  TESSERA_CHECK(ValueError, tensor.defined(), "{}: the {} is undefined", name(kind), role);
  TESSERA_CHECK(ValueError, !is_dtensor(tensor),
                "{}: the {} is a DTensor, which has no memory of its own; pass to_local() of it, this rank's part. The "
                "gradients of fully_shard and replicate are averages over the ranks already",
                name(kind), role);
  TESSERA_CHECK(ValueError, tensor.layout() == c10::kStrided && tensor.is_contiguous(),
                "{}: the {} of sizes [{}] is not dense and contiguous; pass tensor.contiguous()", name(kind), role,
                fmt::join(tensor.sizes(), ", "));
  TESSERA_CHECK(ValueError, !tensor.is_conj() && !tensor.is_neg(),
                "{}: the {} is conjugated or negated lazily, so its memory holds other values; pass "
                "tensor.resolve_conj().resolve_neg()",
                name(kind), role);
  const auto end = static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.element_size();
  TESSERA_CHECK(ValueError, tensor.numel() == 0 || !tensor.has_storage() || end <= tensor.storage().nbytes(),
                "{}: the {} ends at byte {} of a storage of {}: its memory was freed, as that of a parameter that "
                "fully_shard gathered is at reshard; pass a clone() made before",
                name(kind), role, end, tensor.storage().nbytes());
}

void check_rank(Collective kind, const char* role, int rank, int64_t size) {
  TESSERA_CHECK(ValueError, rank >= 0 && rank < size, "{}: {} {}; the group has ranks 0 to {}", name(kind), role, rank,
                size - 1);
}

c10::intrusive_ptr<c10d::Backend> find_backend(Collective kind, c10::DeviceType device, const ProcessGroupPtr& group) {
  TESSERA_CHECK(ValueError, group, "{}: the process group is undefined", name(kind));
  // libtorch 2.11 has no query.
  try {
    return group->getBackend(device);
  } catch (const c10::Error&) {
    throw ValueError(
        fmt::format("{}: group '{}' has no backend for tensors on {}; move the tensor to the group's device",
                    name(kind), group_name(group), c10::DeviceTypeName(device, /*lower_case=*/true)));
  }
}

}  // namespace tessera::detail
