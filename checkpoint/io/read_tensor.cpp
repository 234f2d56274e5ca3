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

// What is read at once where no checksum says how much belongs together.
constexpr int64_t kReadBytes = 4 << 20;

at::Tensor part_of(at::Tensor tensor, const Box& box) {
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  return tensor;
}

}  // namespace

void TensorReader::add(const StoredTensor& tensor, const std::string& key, const Box& box, const at::Tensor& out) {
  const at::NoGradGuard no_grad;
  for (const auto& part : tensor.parts) {
    if (part.blocks.empty()) {
      const int64_t max_numel = std::max<int64_t>(1, kReadBytes / item_bytes(tensor.dtype));
      for (const auto& piece : split_box(intersection(part.box, box), max_numel)) {
        add_piece(tensor, part, piece, nullptr, box, out);
      }
    }
    for (const auto& block : part.blocks) {
      if (intersection(block.box, box).numel() > 0) {
        add_piece(tensor, part, block.box, &block, box, out);
      }
    }
  }
  tensors_.push_back({.key = key, .pieces_end = pieces_.size()});
}

void TensorReader::add_piece(const StoredTensor& tensor, const StoredPart& part, const Box& read,
                             const CheckedBlock* checked, const Box& box, const at::Tensor& out) {
  const Box common = intersection(read, box);
  const at::Tensor target = part_of(out, relative_to(common, box));
  const bool is_direct = common == read && target.scalar_type() == tensor.dtype && target.is_contiguous();
  pieces_.push_back({.part = part,
                     .read = read,
                     .checked = checked,
                     .dtype = tensor.dtype,
                     .target = target,
                     .used = relative_to(common, read),
                     .direct = is_direct ? static_cast<char*>(target.mutable_data_ptr()) : nullptr});
}

void TensorReader::run(const std::function<void(size_t)>& on_filled) {
  const at::NoGradGuard no_grad;
  ReadAhead ahead(pieces_.size(), kBuffers, [this](size_t piece) { read(piece); });
  size_t piece = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    for (; piece < tensors_[i].pieces_end; ++piece) {
      ahead.wait_for(piece);
      prepare(piece + kBuffers);
      verify(piece, tensors_[i].key);
    }
    on_filled(i);
  }
}

/// Of a piece that is not yet being read: that thread is to wait for nothing but the disk.
void TensorReader::prepare(size_t piece) {
  if (piece < pieces_.size() && pieces_[piece].direct) {
    populate(pieces_[piece].direct, pieces_[piece].target.nbytes());
  }
}

char* TensorReader::data_of(size_t piece) {
  return pieces_[piece].direct ? pieces_[piece].direct : buffers_[piece % kBuffers].data();
}

void TensorReader::read(size_t piece) {
  const auto& [part, read, checked, dtype, target, used, direct] = pieces_[piece];
  const int64_t item = item_bytes(dtype);
  auto& buffer = buffers_[piece % kBuffers];
  const auto bytes = static_cast<size_t>(read.numel() * item);
  if (!direct && buffer.size() < bytes) {
    buffer.resize(bytes);
  }
  read_box(file_at(part.file), {.offset = part.offset, .sizes = part.box.sizes, .item_bytes = item},
           relative_to(read, part.box), data_of(piece));
}

/// And puts a buffer's elements where they belong.
void TensorReader::verify(size_t piece, const std::string& key) {
  const auto& [part, read, checked, dtype, target, used, direct] = pieces_[piece];
  char* const data = data_of(piece);
  const auto bytes = static_cast<size_t>(read.numel() * item_bytes(dtype));
  TESSERA_CHECK(CheckpointError, !checked || hash_bytes(data, bytes) == checked->hash,
                "{}: tensor '{}' is damaged: the checksum of its part {} does not hold", part.file, key,
                read.to_string());
  if (!direct) {
    target.copy_(part_of(at::from_blob(data, read.sizes, at::TensorOptions(dtype)), used));
  }
}

const File& TensorReader::file_at(const std::string& path) {
  if (const auto found = files_.find(path); found != files_.end()) {
    return found->second;
  }
  if (files_.size() == kOpenFiles) {
    files_.clear();  // most are read to their end by then
  }
  return files_.emplace(path, File::open(path)).first->second;
}

void verify_blocks(const CheckpointIndex& catalog, int rank, int ranks) {
  std::optional<File> file;
  std::vector<char> buffer;
  int next = 0;
  const auto verify = [&](const std::string& key, const StoredTensor& tensor, const StoredPart& part,
                          const CheckedBlock& block) {
    if (!file || file->path() != part.file) {
      file = File::open(part.file);
    }
    buffer.resize(static_cast<size_t>(block.box.numel() * item_bytes(tensor.dtype)));
    read_box(*file, {.offset = part.offset, .sizes = part.box.sizes, .item_bytes = item_bytes(tensor.dtype)},
             relative_to(block.box, part.box), buffer.data());
    TESSERA_CHECK(CheckpointError, hash_bytes(buffer.data(), buffer.size()) == block.hash,
                  "{}: tensor '{}' is damaged: the checksum of its part {} does not hold", part.file, key,
                  block.box.to_string());
  };
  for (const auto& [section, tensors] : catalog.tensors) {
    for (const auto& [key, tensor] : tensors) {
      for (const auto& part : tensor.parts) {
        for (const auto& block : part.blocks) {
          // How long an element of an unknown dtype is, nobody says.
          if (next++ % ranks == rank && tensor.unknown_dtype.empty()) {
            verify(file_key(section, key), tensor, part, block);
          }
        }
      }
    }
  }
}

}  // namespace tessera::dcp
