#include "checkpoint/read_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/file_io.h"

namespace tessera::dcp {

namespace {

// What is read at once where no checksum says how much belongs together.
constexpr int64_t kReadBytes = 4 << 20;
// How far the disk is told to read ahead: it would rest while a block is verified, and while its bytes are copied.
constexpr int64_t kAheadBytes = 16 << 20;

/// What is read at once.
struct Piece {
  const ReadRequest* request = nullptr;
  const StoredPart* part = nullptr;
  const CheckedBlock* checked = nullptr;  // null: there is no checksum
  Box box;                                // of the tensor

  int64_t item_bytes() const { return static_cast<int64_t>(c10::elementSize(request->tensor->dtype)); }
  int64_t bytes() const { return box.numel() * item_bytes(); }
  TensorBytes stored() const { return {.offset = part->offset, .sizes = part->box.sizes, .item_bytes = item_bytes()}; }
  Box box_in_part() const { return relative_to(box, part->box); }
};

std::vector<Piece> pieces_of(const ReadRequest& request) {
  std::vector<Piece> pieces;
  const auto item = static_cast<int64_t>(c10::elementSize(request.tensor->dtype));
  for (const auto& part : request.tensor->parts) {
    if (part.blocks.empty()) {
      for (auto& box : split_box(intersection(part.box, request.box), std::max<int64_t>(1, kReadBytes / item))) {
        pieces.push_back({.request = &request, .part = &part, .box = std::move(box)});
      }
    }
    for (const auto& block : part.blocks) {
      if (intersection(block.box, request.box).numel() > 0) {
        pieces.push_back({.request = &request, .part = &part, .checked = &block, .box = block.box});
      }
    }
  }
  return pieces;
}

at::Tensor part_of(at::Tensor tensor, const Box& box) {
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  return tensor;
}

/// Keeps files open, and has one buffer.
class PieceReader {
 public:
  void begin(const Piece& piece) { begin_read_box(file_of(piece), piece.stored(), piece.box_in_part()); }
  void read(const Piece& piece);

 private:
  const File& file_of(const Piece& piece) {
    const std::string& path = piece.part->file;
    const auto found = files_.find(path);
    return found != files_.end() ? found->second : files_.emplace(path, File::open(path)).first->second;
  }

  std::map<std::string, File> files_;
  std::vector<char> buffer_;
};

void PieceReader::read(const Piece& piece) {
  const auto& [tensor, key, box, out] = *piece.request;
  const Box common = intersection(piece.box, box);
  const at::Tensor target = part_of(out, relative_to(common, box));
  const bool is_direct = common == piece.box && target.scalar_type() == tensor->dtype && target.is_contiguous();
  const auto bytes = static_cast<size_t>(piece.bytes());
  buffer_.resize(is_direct ? 0 : bytes);
  void* const data = is_direct ? target.mutable_data_ptr() : buffer_.data();
  read_box(file_of(piece), piece.stored(), piece.box_in_part(), data);
  TESSERA_CHECK(CheckpointError, !piece.checked || hash_bytes(data, bytes) == piece.checked->hash,
                "{}: tensor '{}' is damaged: the checksum of its part {} does not hold", piece.part->file, key,
                piece.box.to_string());
  if (!is_direct) {
    const auto source = at::from_blob(data, piece.box.sizes, at::TensorOptions(tensor->dtype));
    target.copy_(part_of(source, relative_to(common, piece.box)));
  }
}

}  // namespace

void read_tensors(const std::vector<ReadRequest>& requests, const std::function<void(size_t)>& on_read) {
  const at::NoGradGuard no_grad;
  std::vector<Piece> pieces;
  std::vector<size_t> ends;  // of each request's pieces
  for (const auto& request : requests) {
    auto own = pieces_of(request);
    std::move(own.begin(), own.end(), std::back_inserter(pieces));
    ends.push_back(pieces.size());
  }
  PieceReader reader;
  size_t begun = 0, next = 0;
  int64_t ahead = 0;  // bytes that were begun and not read
  for (size_t i = 0; i < requests.size(); ++i) {
    for (; next < ends[i]; ++next) {
      for (; begun < pieces.size() && (begun <= next || ahead < kAheadBytes); ++begun) {
        reader.begin(pieces[begun]);
        ahead += pieces[begun].bytes();
      }
      reader.read(pieces[next]);
      ahead -= pieces[next].bytes();
    }
    on_read(i);
  }
}

}  // namespace tessera::dcp
