#pragma once
// The shard of a state dict's tensor that this rank holds. Internal to this package.

#include "checkpoint/format/shard_slice.h"
#include "checkpoint/format/state.h"
#include "checkpoint/format/value.h"
#include "checkpoint/plan/save_plan.h"

namespace tessera::dcp {

struct LocalPart {
  Section section = Section::Model;
  std::string key;
  Sizes sizes = {};  // of the whole tensor
  ShardSlice slice = {};
  at::Tensor local = {};  // the elements of `slice`; plain, without autograd history
  bool is_plain = false;  // whether the tensor itself is plain
  uint64_t mesh = 0;      // see ShardEntry
};

const StateDict& select_section(const State& state, Section section);
StateDict& select_section(State& state, Section section);

/// Returns this rank's shard of a defined tensor. Throws ValueError that names the key for a Partial, meta or sparse
/// tensor and for freed memory, and StateError for a stale copy of a view.
LocalPart local_part(Section section, const std::string& key, const at::Tensor& tensor);

at::Tensor detached_local(const at::Tensor& tensor);  // local tensor, without autograd history

/// Throws NotImplementedError for a DTensor's view that is a copy: a write would not reach its base.
void check_writable(const char* where, const std::string& key, const at::Tensor& tensor);

/// Throws ValueError if the memory of a plain strided tensor was freed.
void check_memory(const char* where, const std::string& key, const at::Tensor& tensor);

/// Returns this rank's shards of all tensors, in order. Throws ValueError for an undefined tensor.
std::vector<LocalPart> local_parts(const State& state);

std::vector<ShardEntry> make_shard_entries(const std::vector<LocalPart>& parts);

std::map<Section, Values> collect_values(const State& state);  // everything that is not a tensor

/// Returns the elements of `slice`, which is inside the shard's slice.
at::Tensor block_view(const LocalPart& part, const ShardSlice& slice);
/// Returns the same, contiguous on the host; copies if needed.
at::Tensor host_copy(const LocalPart& part, const ShardSlice& slice);

}  // namespace tessera::dcp
