#pragma once
// A tensor of a state dict as this rank holds it; internal to this package.

#include "checkpoint/format/box.h"
#include "checkpoint/format/state.h"
#include "checkpoint/format/value.h"
#include "checkpoint/plan/save_plan.h"

namespace tessera::dcp {

/// This rank's part of a tensor: `local` holds the elements of `box`.
struct LocalPart {
  Section section = Section::Model;
  std::string key;
  Sizes sizes = {};  // of the whole tensor
  Box box = {};
  at::Tensor local = {};  // plain, without autograd history
  bool is_plain = false;  // the tensor itself is
  uint64_t mesh = 0;      // as in Piece
};

const StateDict& section_of(const State& state, Section section);
StateDict& section_of(State& state, Section section);

/// Of a defined tensor. Throws ValueError that names the key for a DTensor with a pending reduction, one on the meta
/// device, one that is not dense, or one whose memory was freed; StateError for a view that is a copy, and old.
LocalPart local_part(Section section, const std::string& key, const at::Tensor& tensor);

/// Returns the part of the tensor that this rank holds, as a plain tensor without autograd history.
at::Tensor local_of(const at::Tensor& tensor);

/// Throws NotImplementedError, beginning with `where`, for a view that is a copy: what it views would not see the
/// write.
void check_writable(const char* where, const std::string& key, const at::Tensor& tensor);

/// Throws ValueError, beginning with `where`, for a plain strided tensor whose memory was freed.
void check_memory(const char* where, const std::string& key, const at::Tensor& tensor);

/// All tensors of `state`, in order. Throws ValueError for an undefined one.
std::vector<LocalPart> local_parts(const State& state);

std::vector<Piece> pieces_of(const std::vector<LocalPart>& parts);

/// What is no tensor.
std::map<Section, Values> values_of(const State& state);

/// The elements of `box`, which lies in the part's box.
at::Tensor block_view(const LocalPart& part, const Box& box);
/// The same, row-major and in host memory; a copy only where they are not.
at::Tensor host_copy(const LocalPart& part, const Box& box);

}  // namespace tessera::dcp
