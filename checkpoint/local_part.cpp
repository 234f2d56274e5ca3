#include "checkpoint/local_part.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/read_tensor.h"
#include "dtensor/dtensor.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera::dcp {

namespace {

ShardSlice local_slice(const DTensorSpec& spec) {
  ShardSlice slice;
  for (int64_t dim = 0; dim < spec.ndim(); ++dim) {
    const auto range = local_range(spec.sizes()[static_cast<size_t>(dim)], dim, spec.placements(), spec.position());
    slice.offsets.push_back(range.offset);
    slice.sizes.push_back(range.length);
  }
  return slice;
}

}  // namespace

const StateDict& select_section(const State& state, Section section) {
  return section == Section::Model ? state.model : section == Section::Optimizer ? state.optimizer : state.user;
}

StateDict& select_section(State& state, Section section) {
  return const_cast<StateDict&>(select_section(std::as_const(state), section));
}

LocalPart local_part(Section section, const std::string& key, const at::Tensor& tensor) {
  LocalPart part{.section = section, .key = key, .sizes = tensor.sizes().vec(), .slice = {}, .local = {}};
  if (const auto* meta = dtensor_meta(tensor)) {
    TESSERA_CHECK(
        ValueError, !meta->spec->has_partial(),
        "checkpoint: '{}' is {}; a sum that is still to be made has no place in a file. Call redistribute() first",
        file_key(section, key), meta->spec->to_string());
    if (meta->materialized_view.is_stale()) {
      check_not_stale(*meta, fmt::format("checkpoint: '{}'", file_key(section, key)).c_str());
    }
    const auto& ranks = meta->spec->mesh().ranks();
    part.slice = local_slice(*meta->spec);
    part.local = meta->local;
    part.mesh = hash_bytes(ranks.data(), ranks.size() * sizeof(ranks[0]));
  } else {
    part.slice = ShardSlice::whole(part.sizes);
    part.local = tensor.detach();
    part.is_plain = true;
  }
  TESSERA_CHECK(ValueError, part.local.layout() == at::kStrided && !part.local.is_meta(),
                "checkpoint: '{}' lies on {} in layout {}; it needs memory, and the strided layout",
                file_key(section, key), part.local.device().str(), c10::str(part.local.layout()));
  check_memory("checkpoint", file_key(section, key), part.local);
  return part;
}

at::Tensor detached_local(const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  return meta ? meta->local : tensor.detach();
}

void check_memory(const char* where, const std::string& key, const at::Tensor& tensor) {
  const auto offset = static_cast<size_t>(tensor.storage_offset());
  const auto end =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), offset);
  TESSERA_CHECK(ValueError, end <= tensor.storage().nbytes(),
                "{}: '{}' ends at byte {} of a storage of {}: its memory was freed, as that of a parameter that "
                "fully_shard gathered is at reshard. Give the parameter itself, or a clone() made before",
                where, key, end, tensor.storage().nbytes());
}

void check_writable(const char* where, const std::string& key, const at::Tensor& tensor) {
  const auto* meta = dtensor_meta(tensor);
  TESSERA_CHECK(NotImplementedError, !meta || !meta->materialized_view,
                "{}: '{}' is a view whose data had to be moved, {}, and what it views would not see what is written to "
                "it. Give the viewed tensor itself",
                where, key, meta->spec->to_string());
}

std::vector<LocalPart> local_parts(const State& state) {
  std::vector<LocalPart> parts;
  for (const Section section : kSections) {
    for (const auto& [key, value] : select_section(state, section)) {
      if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
        TESSERA_CHECK(ValueError, tensor->defined(), "save: '{}' is an undefined tensor", file_key(section, key));
        parts.push_back(local_part(section, key, *tensor));
      }
    }
  }
  return parts;
}

std::vector<ShardEntry> make_shard_entries(const std::vector<LocalPart>& parts) {
  std::vector<ShardEntry> entries;
  entries.reserve(parts.size());
  for (const auto& part : parts) {
    entries.push_back({.section = part.section,
                       .key = part.key,
                       .dtype = part.local.scalar_type(),
                       .sizes = part.sizes,
                       .slice = part.slice,
                       .is_plain = part.is_plain,
                       .mesh = part.mesh});
  }
  return entries;
}

std::map<Section, Values> collect_values(const State& state) {
  std::map<Section, Values> values;
  for (const Section section : kSections) {
    for (const auto& [key, value] : select_section(state, section)) {
      if (const auto* number = std::get_if<int64_t>(&value)) {
        values[section][key] = *number;
      } else if (const auto* real = std::get_if<double>(&value)) {
        values[section][key] = *real;
      } else if (const auto* text = std::get_if<std::string>(&value)) {
        values[section][key] = *text;
      }
    }
  }
  return values;
}

at::Tensor block_view(const LocalPart& part, const ShardSlice& slice) {
  const at::NoGradGuard no_grad;
  return narrow_to(part.local, relative_to(slice, part.slice));
}

at::Tensor host_copy(const LocalPart& part, const ShardSlice& slice) {
  const at::NoGradGuard no_grad;
  return block_view(part, slice).to(at::kCPU).resolve_conj().resolve_neg().contiguous();
}

}  // namespace tessera::dcp
