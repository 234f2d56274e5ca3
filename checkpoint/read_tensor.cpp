#include "checkpoint/read_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include "checkpoint/checkpoint_error.h"

namespace tessera::dcp {

namespace {

// What is read at once where no checksum says how much belongs together.
constexpr int64_t kReadBytes = 4 << 20;

at::Tensor part_of(at::Tensor tensor, const Box& box) {
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  return tensor;
}

}  // namespace

const File& TensorReader::file_at(const std::string& path) {
  const auto found = files_.find(path);
  return found != files_.end() ? found->second : files_.emplace(path, File::open(path)).first->second;
}

void TensorReader::read_common(const StoredTensor& tensor, const StoredPart& part, const Box& read,
                               const CheckedBlock* checked, const std::string& key, const Box& box,
                               const at::Tensor& out) {
  const auto item = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const Box common = intersection(read, box);
  const at::Tensor target = part_of(out, relative_to(common, box));
  const bool is_direct = common == read && target.scalar_type() == tensor.dtype && target.is_contiguous();
  const auto bytes = static_cast<size_t>(read.numel() * item);
  buffer_.resize(is_direct ? 0 : bytes);
  void* const data = is_direct ? target.mutable_data_ptr() : buffer_.data();
  const File& file = file_at(part.file);
  read_box(file, {.offset = part.offset, .sizes = part.box.sizes, .item_bytes = item}, relative_to(read, part.box),
           data);
  TESSERA_CHECK(CheckpointError, !checked || hash_bytes(data, bytes) == checked->hash,
                "{}: tensor '{}' is damaged: the checksum of its part {} does not hold", part.file, key,
                read.to_string());
  if (!is_direct) {
    const auto source = at::from_blob(data, read.sizes, at::TensorOptions(tensor.dtype));
    target.copy_(part_of(source, relative_to(common, read)));
  }
}

void TensorReader::read(const StoredTensor& tensor, const std::string& key, const Box& box, const at::Tensor& out) {
  const at::NoGradGuard no_grad;
  const auto item = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const auto& part : tensor.parts) {
    if (part.blocks.empty()) {
      for (const auto& piece : split_box(intersection(part.box, box), std::max<int64_t>(1, kReadBytes / item))) {
        read_common(tensor, part, piece, nullptr, key, box, out);
      }
    }
    for (const auto& block : part.blocks) {
      if (intersection(block.box, box).numel() > 0) {
        read_common(tensor, part, block.box, &block, key, box, out);
      }
    }
  }
}

}  // namespace tessera::dcp
