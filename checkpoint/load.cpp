#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <fmt/ranges.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/cast.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/read_tensor.h"
#include "checkpoint/io/staging.h"
#include "checkpoint/local_part.h"
#include "checkpoint/ranks/rank_sync.h"
#include "dtensor/local/dtensor_impl.h"

namespace tessera::dcp {

namespace {

using nlohmann::json;

/// Tensor being loaded: read into `staged`, then copied to the state's tensor.
struct Target {
  LocalPart part;  // part.local is undefined if the state's tensor was
  const StoredTensor* stored = nullptr;
  StateValue* value = nullptr;
  at::Tensor staged;

  std::string name() const { return file_key(part.section, part.key); }
};

using Keys = std::vector<std::string>;

/// Keys with their section, as in messages.
struct KeyCheck {
  Keys missing;                                 // in this rank's state, but not in the checkpoint
  std::map<std::string, Keys> unexpected = {};  // the opposite, by the sections that this rank's state has
};

struct LoadPlan {
  std::vector<Target> targets;
  std::vector<std::pair<StateValue*, Value>> values;
  KeyCheck keys;
};

template <class Map>
auto find_in(const std::map<Section, Map>& sections, Section section, const std::string& key) -> const
    typename Map::mapped_type* {
  const auto own = sections.find(section);
  if (own == sections.end()) {
    return nullptr;
  }
  const auto found = own->second.find(key);
  return found == own->second.end() ? nullptr : &found->second;
}

std::string first_file(const CheckpointIndex& index, const StoredTensor& stored) {
  return stored.parts.empty() ? index.path : stored.parts[0].file;
}

void check_fit(const CheckpointIndex& index, const Target& target) {
  const StoredTensor& stored = *target.stored;
  const std::string file = first_file(index, stored);
  TESSERA_CHECK(ValueError, target.part.sizes == stored.sizes,
                "{}: tensor '{}' has sizes [{}], the one to load into has [{}]; is it another model?", file,
                target.name(), fmt::join(stored.sizes, ", "), fmt::join(target.part.sizes, ", "));
  const auto dtype = target.part.local.scalar_type();
  TESSERA_CHECK(ValueError, may_cast(stored.dtype, dtype),
                "{}: tensor '{}' is {}, the one to load into {}; only floating dtypes are cast", file, target.name(),
                c10::toString(stored.dtype), c10::toString(dtype));
}

void add_tensor(LoadPlan& plan, const CheckpointIndex& index, LocalPart part, StateValue& value) {
  const auto* stored = find_in(index.tensors, part.section, part.key);
  if (!stored) {
    plan.keys.missing.push_back(file_key(part.section, part.key));
    return;
  }
  TESSERA_CHECK(CheckpointError, stored->unknown_dtype.empty(),
                "{}: tensor '{}' has dtype {}, which this library does not know", first_file(index, *stored),
                file_key(part.section, part.key), stored->unknown_dtype);
  Target target{.part = std::move(part), .stored = stored, .value = &value, .staged = {}};
  if (target.part.local.defined()) {
    check_fit(index, target);
  } else {
    target.part.sizes = stored->sizes;
    target.part.slice = ShardSlice::whole(stored->sizes);
  }
  plan.targets.push_back(std::move(target));
}

/// Throws if the checkpoint has a value of another type under this key. Otherwise the program's std::get would fail
/// later, without naming the source of the value.
void check_type(const CheckpointIndex& index, Section section, const std::string& key, const StateValue& own) {
  static constexpr std::array kTypes = {"a tensor", "an int64_t", "a double", "a string"};  // as in StateValue
  const auto* tensor = find_in(index.tensors, section, key);
  const auto* value = find_in(index.values, section, key);
  const bool is_tensor = std::holds_alternative<at::Tensor>(own);
  if ((!tensor && !value) || (is_tensor && tensor)) {
    return;
  }
  const size_t stored = value ? value->index() + 1 : 0;
  TESSERA_CHECK(CheckpointError, stored == own.index(),
                "{}: '{}' is {}, the one to load into {}; give the state what the checkpoint has",
                value ? index.path + "/" + kManifestName : first_file(index, *tensor), file_key(section, key),
                kTypes.at(stored), kTypes.at(own.index()));
}

LocalPart part_to_write(Section section, const std::string& key, const at::Tensor& tensor) {
  check_writable("load", file_key(section, key), tensor);
  return local_part(section, key, tensor);
}

void add_section(LoadPlan& plan, const CheckpointIndex& index, Section section, StateDict& own) {
  for (auto& [key, value] : own) {
    check_type(index, section, key, value);
    if (const auto* tensor = std::get_if<at::Tensor>(&value)) {
      add_tensor(plan, index,
                 tensor->defined() ? part_to_write(section, key, *tensor) : LocalPart{.section = section, .key = key},
                 value);
    } else if (const auto* stored = find_in(index.values, section, key)) {
      plan.values.emplace_back(&value, *stored);
    } else {
      plan.keys.missing.push_back(file_key(section, key));
    }
  }
  if (section == Section::User || own.empty()) {
    return;
  }
  auto& unexpected = plan.keys.unexpected[section_name(section)];
  const auto note_unexpected = [&](const auto& sections) {
    if (const auto stored = sections.find(section); stored != sections.end()) {
      for (const auto& [key, unused] : stored->second) {
        if (own.count(key) == 0) {
          unexpected.push_back(file_key(section, key));
        }
      }
    }
  };
  note_unexpected(index.tensors);
  note_unexpected(index.values);
}

std::string listed(std::vector<std::string> keys) {
  const size_t count = keys.size();
  keys.resize(std::min<size_t>(count, 8));
  return fmt::format("{} ({}{})", count, fmt::join(keys, ", "), count > keys.size() ? ", ..." : "");
}

LoadPlan make_plan(const CheckpointIndex& index, State& state) {
  LoadPlan plan;
  for (const Section section : kSections) {
    add_section(plan, index, section, select_section(state, section));
  }
  return plan;
}

/// Formats keys for exchange. A key that is not UTF-8 is in no checkpoint, and need not be reproduced exactly.
std::string format_keys(const KeyCheck& keys) {
  return json{{"missing", keys.missing}, {"unexpected", keys.unexpected}}.dump(-1, ' ', false,
                                                                               json::error_handler_t::replace);
}

/// Combines the results of all ranks. A key is missing if it is missing on any rank. It is unexpected if it is
/// unexpected on all ranks that request anything of its section, because a rank may have only some layers.
LoadResult join_keys(const std::vector<std::string>& texts) {
  std::set<std::string> missing;
  std::map<std::string, std::set<std::string>> unexpected;
  for (const auto& text : texts) {
    const json keys = json::parse(text);
    missing.merge(keys.at("missing").get<std::set<std::string>>());
    for (const auto& [section, own] : keys.at("unexpected").get<std::map<std::string, std::set<std::string>>>()) {
      const auto [place, is_first] = unexpected.emplace(section, own);
      if (!is_first) {
        std::erase_if(place->second, [&, &own = own](const std::string& key) { return own.count(key) == 0; });
      }
    }
  }
  LoadResult all{.missing_keys = {missing.begin(), missing.end()}, .unexpected_keys = {}};
  for (const auto section : kSections) {
    const auto& keys = unexpected[section_name(section)];
    all.unexpected_keys.insert(all.unexpected_keys.end(), keys.begin(), keys.end());
  }
  return all;
}

/// Throws in strict mode; equally on all ranks.
void check_strict(const std::string& path, const LoadResult& all) {
  TESSERA_CHECK(KeyError, all.missing_keys.empty() && all.unexpected_keys.empty(),
                "{}: keys that it lacks: {}; keys that are not to be loaded: {}. With strict = false what both have is "
                "loaded",
                path, listed(all.missing_keys), listed(all.unexpected_keys));
}

int64_t bytes_to_read(const Target& target) {
  return target.part.slice.numel() * item_bytes(target.stored->dtype);
}

/// Allocates memory to read into: views of one block for the state's tensors, and separate memory for undefined
/// tensors, which then keep it.
void stage(std::vector<Target>& targets) {
  std::vector<int64_t> bytes;
  bytes.reserve(targets.size());
  for (const auto& [part, stored, value, staged] : targets) {
    bytes.push_back(part.local.defined() ? part.slice.numel() * item_bytes(part.local.scalar_type()) : 0);
  }
  const auto offsets = staging_offsets(bytes);
  const auto block = new_staging_block(offsets.back());
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto& local = targets[i].part.local;
    const auto& sizes = targets[i].part.slice.sizes;
    targets[i].staged = local.defined() ? block.narrow(0, offsets[i], bytes[i]).view(local.scalar_type()).view(sizes)
                                        : at::empty(sizes, targets[i].stored->dtype);
  }
}

void read_all(LoadPlan& plan, const ProgressFn& on_progress) {
  RECORD_USER_SCOPE("checkpoint: read");
  Progress progress;
  for (const auto& target : plan.targets) {
    progress.bytes_total += bytes_to_read(target);
  }
  stage(plan.targets);
  TensorReader reader;
  for (const auto& target : plan.targets) {
    reader.add(*target.stored, target.name(), target.part.slice, target.staged);
  }
  reader.run([&](size_t i) {
    progress.bytes_done += bytes_to_read(plan.targets[i]);
    if (on_progress) {
      on_progress(progress);
    }
  });
}

void commit_tensors(LoadPlan& plan) {
  const at::NoGradGuard no_grad;
  for (auto& target : plan.targets) {
    if (target.part.local.defined()) {
      copy_past_cache(target.part.local, target.staged);
      if (const auto& tensor = std::get<at::Tensor>(*target.value); dtensor_meta(tensor)) {
        count_write(tensor);  // a graph that saved it must detect the change
      }
    } else {
      *target.value = target.staged;
    }
    target.staged = at::Tensor();
  }
}

/// Cannot fail, because it only moves values.
void commit_values(LoadPlan& plan) {
  for (auto& [value, stored] : plan.values) {
    std::visit([&target = *value](auto& content) { target = std::move(content); }, stored);
  }
}

}  // namespace

LoadResult load(const std::string& path, State& state, const LoadOptions& options) {
  const RankSync ranks = RankSync::all();
  CheckpointIndex index;
  LoadPlan plan;
  LoadResult result = join_keys(ranks.exchange([&] {
    index = open_checkpoint(path, options.variant);
    plan = make_plan(index, state);
    return format_keys(plan.keys);
  }));
  if (options.strict) {
    check_strict(path, result);
  }
  ranks.on_all_ranks([&] { read_all(plan, options.progress); });
  ranks.on_all_ranks([&] { commit_tensors(plan); });
  commit_values(plan);
  result.missing_keys = std::move(plan.keys.missing);
  return result;
}

}  // namespace tessera::dcp
