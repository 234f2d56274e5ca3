#include "fully_shard/memory/tensor_memory.h"

#include "dtensor/local/dtensor_impl.h"

namespace tessera {

const void* memory_of(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  const auto& local = meta ? meta->local : tensor;
  return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace tessera
