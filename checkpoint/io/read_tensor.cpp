#include "checkpoint/io/read_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <optional>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/io/read_ahead.h"
#include "checkpoint/io/staging.h"

namespace tessera::dcp {

namespace {

// Size of one read, unless a checksum covers more.
constexpr int64_t kReadBytes = 4 << 20;
// Smallest memory for which populating pages in advance is worth a call.
constexpr size_t kPopulateFrom = size_t{64} << 10;

/// Rounds up to an alignment for every dtype.
size_t aligned(size_t bytes) {
  constexpr size_t kAlignment = 64;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

at::Tensor narrow_to(at::Tensor tensor, const ShardSlice& slice) {
  for (size_t dim = 0; dim < slice.sizes.size(); ++dim) {
    const auto own = static_cast<int64_t>(dim);
    if (slice.sizes[dim] != tensor.size(own)) {
      tensor = tensor.narrow(own, slice.offsets[dim], slice.sizes[dim]);
    }
  }
  return tensor;
}

void TensorReader::add(const StoredTensor& tensor, const std::string& key, const ShardSlice& slice,
                       const at::Tensor& out) {
  const at::NoGradGuard no_grad;
  for (const auto& part : tensor.parts) {
    if (part.blocks.empty()) {
      const int64_t max_numel = std::max<int64_t>(1, kReadBytes / item_bytes(tensor.dtype));
      for (const auto& read : split_slice(intersection(part.slice, slice), max_numel)) {
        add_item(tensor, part, read, nullptr, slice, out);
      }
    }
    for (const auto& block : part.blocks) {
      if (intersection(block.slice, slice).numel() > 0) {
        add_item(tensor, part, block.slice, &block, slice, out);
      }
    }
  }
  tensors_.push_back({.key = key, .items_end = items_.size()});
}

void TensorReader::add_item(const StoredTensor& tensor, const StoredPart& part, const ShardSlice& read,
                            const CheckedBlock* checked, const ShardSlice& slice, const at::Tensor& out) {
  const ShardSlice common = intersection(read, slice);
  const at::Tensor target = narrow_to(out, relative_to(common, slice));
  const bool is_direct = common == read && target.scalar_type() == tensor.dtype && target.is_contiguous();
  ReadItem item{.part = part,
                .read = read,
                .checked = checked,
                .dtype = tensor.dtype,
                .target = target,
                .used = relative_to(common, read),
                .direct = is_direct ? static_cast<char*>(target.mutable_data_ptr()) : nullptr,
                .batch = 0,
                .begin = 0};
  if (batches_.empty() || batches_.back().bytes + item.bytes() > size_t{kReadBytes}) {
    batches_.push_back({.first = items_.size(), .end = items_.size(), .bytes = 0, .buffer_bytes = 0});
  }
  Batch& batch = batches_.back();
  item.batch = batches_.size() - 1;
  item.begin = batch.buffer_bytes;
  batch.bytes += item.bytes();
  batch.buffer_bytes += is_direct ? 0 : aligned(item.bytes());
  ++batch.end;
  items_.push_back(std::move(item));
}

size_t TensorReader::ReadItem::bytes() const {
  return static_cast<size_t>(read.numel() * item_bytes(dtype));
}

void TensorReader::run(const std::function<void(size_t)>& on_filled) {
  const at::NoGradGuard no_grad;
  ReadAhead ahead(batches_.size(), kBuffers, [this](size_t batch) { read(batch); });
  size_t next = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    for (; next < tensors_[i].items_end; ++next) {
      const ReadItem& item = items_[next];
      if (next == batches_[item.batch].first) {
        ahead.wait_for(item.batch);
        prepare(item.batch + kBuffers);
      }
      verify(item, tensors_[i].key);
    }
    on_filled(i);
  }
}

/// Prepares a batch before it is read, so that the reading thread waits only for the disk.
void TensorReader::prepare(size_t batch) {
  if (batch < batches_.size()) {
    for (size_t i = batches_[batch].first; i < batches_[batch].end; ++i) {
      if (items_[i].direct && items_[i].bytes() >= kPopulateFrom) {
        populate(items_[i].direct, static_cast<int64_t>(items_[i].bytes()));
      }
    }
  }
}

char* TensorReader::destination(const ReadItem& item) {
  return item.direct ? item.direct : buffers_[item.batch % kBuffers].data() + item.begin;
}

void TensorReader::read(size_t batch) {
  auto& buffer = buffers_[batch % kBuffers];
  if (buffer.size() < batches_[batch].buffer_bytes) {
    buffer.resize(batches_[batch].buffer_bytes);
  }
  for (size_t i = batches_[batch].first; i < batches_[batch].end; ++i) {
    const ReadItem& item = items_[i];
    read_slice(file_at(item.part.file),
               {.offset = item.part.offset, .sizes = item.part.slice.sizes, .item_bytes = item_bytes(item.dtype)},
               relative_to(item.read, item.part.slice), destination(item));
  }
}

/// Verifies checksums, and moves a buffer's elements to their destination.
void TensorReader::verify(const ReadItem& item, const std::string& key) {
  char* const data = destination(item);
  TESSERA_CHECK(CheckpointError, !item.checked || hash_bytes(data, item.bytes()) == item.checked->hash,
                "{}: tensor '{}' is damaged: the checksum of its part {} does not hold", item.part.file, key,
                item.read.to_string());
  if (!item.direct) {
    item.target.copy_(narrow_to(at::from_blob(data, item.read.sizes, at::TensorOptions(item.dtype)), item.used));
  }
}

const File& TensorReader::file_at(const std::string& path) {
  if (const auto found = files_.find(path); found != files_.end()) {
    return found->second;
  }
  if (files_.size() == kOpenFiles) {
    files_.clear();  // most have been read completely by then
  }
  return files_.emplace(path, File::open(path)).first->second;
}

void verify_blocks(const CheckpointIndex& index, int rank, int ranks) {
  std::optional<File> file;
  std::vector<char> buffer;
  int next = 0;
  const auto verify = [&](const std::string& key, const StoredTensor& tensor, const StoredPart& part,
                          const CheckedBlock& block) {
    if (!file || file->path() != part.file) {
      file = File::open(part.file);
    }
    buffer.resize(static_cast<size_t>(block.slice.numel() * item_bytes(tensor.dtype)));
    read_slice(*file, {.offset = part.offset, .sizes = part.slice.sizes, .item_bytes = item_bytes(tensor.dtype)},
               relative_to(block.slice, part.slice), buffer.data());
    TESSERA_CHECK(CheckpointError, hash_bytes(buffer.data(), buffer.size()) == block.hash,
                  "{}: tensor '{}' is damaged: the checksum of its part {} does not hold", part.file, key,
                  block.slice.to_string());
  };
  for (const auto& [section, tensors] : index.tensors) {
    for (const auto& [key, tensor] : tensors) {
      for (const auto& part : tensor.parts) {
        for (const auto& block : part.blocks) {
          // The element size of an unknown dtype is not known.
          if (next++ % ranks == rank && tensor.unknown_dtype.empty()) {
            verify(file_key(section, key), tensor, part, block);
          }
        }
      }
    }
  }
}

}  // namespace tessera::dcp
