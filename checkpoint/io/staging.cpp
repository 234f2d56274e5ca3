#include "checkpoint/io/staging.h"

#include <ATen/ops/empty.h>
#include <sys/mman.h>

#include "comm/backend/stream_copy.h"

namespace tessera::dcp {

namespace {

constexpr int64_t kAlignment = 64;
constexpr size_t kStreamFrom = size_t{64} << 10;
constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

}  // namespace

std::vector<int64_t> staging_offsets(const std::vector<int64_t>& bytes) {
  std::vector<int64_t> offsets = {0};
  for (const int64_t own : bytes) {
    offsets.push_back((offsets.back() + own + kAlignment - 1) / kAlignment * kAlignment);
  }
  return offsets;
}

at::Tensor new_staging_block(int64_t bytes) {
  auto block = at::empty({bytes}, at::kByte);
  auto* const data = static_cast<char*>(block.mutable_data_ptr());
  // madvise takes whole pages only.
  const auto head = static_cast<int64_t>((kHugePage - reinterpret_cast<uintptr_t>(data) % kHugePage) % kHugePage);
  if (bytes - head >= static_cast<int64_t>(kHugePage)) {
    ::madvise(data + head, static_cast<size_t>(bytes - head) / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
  return block;
}

void populate([[maybe_unused]] char* data, [[maybe_unused]] int64_t bytes) noexcept {
#ifdef MADV_POPULATE_WRITE
  constexpr uintptr_t kPage = 4096;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes);
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
#endif
}

void copy_past_cache(const at::Tensor& target, const at::Tensor& source) {
  const bool same_bytes = target.device().is_cpu() && source.device().is_cpu() &&
                          target.scalar_type() == source.scalar_type() && target.is_contiguous() &&
                          source.is_contiguous() && target.sizes() == source.sizes() &&
                          target.is_conj() == source.is_conj() && target.is_neg() == source.is_neg();
  if (!same_bytes || source.nbytes() < kStreamFrom) {
    target.copy_(source);
    return;
  }
  stream_copy(target.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  if (!target.is_inference()) {
    target.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace tessera::dcp
