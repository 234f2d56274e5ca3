#include "checkpoint/plan/save_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <span>
#include <utility>

#include "base/error.h"
#include "checkpoint/format/fields.h"

namespace tessera::dcp {

namespace {

/// Tensor with its shards on all ranks.
struct Whole {
  const ShardEntry* first = nullptr;
  size_t first_rank = 0;
  std::map<ShardSlice, std::vector<int>> holders;  // ranks of the first rank's mesh
};

using Wholes = std::map<std::pair<Section, std::string>, Whole>;

std::string describe_entry(const ShardEntry& entry) {
  return fmt::format("{}[{}]", safetensors_dtype(entry.dtype), fmt::join(entry.sizes, ", "));
}

Wholes collect(const std::vector<std::vector<ShardEntry>>& entries) {
  Wholes wholes;
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    for (const auto& entry : entries[rank]) {
      auto& whole = wholes[{entry.section, entry.key}];
      if (!whole.first) {
        whole.first = &entry;
        whole.first_rank = rank;
      }
      TESSERA_CHECK(ValueError, entry.sizes == whole.first->sizes && entry.dtype == whole.first->dtype,
                    "save: the ranks differ in '{}': rank {} has {}, rank {} has {}",
                    file_key(entry.section, entry.key), whole.first_rank, describe_entry(*whole.first), rank,
                    describe_entry(entry));
      TESSERA_ASSERT(is_inside(entry.slice, entry.sizes), "'{}': {}", entry.key, entry.slice.to_string());
      // Copies on other meshes may have different values.
      if (entry.slice.numel() > 0 && entry.mesh == whole.first->mesh) {
        whole.holders[entry.slice].push_back(static_cast<int>(rank));
      }
    }
  }
  return wholes;
}

/// Checks that the shards cover each element of the tensor exactly once.
void check_saved_parts(const std::string& key, const Whole& whole) {
  std::vector<ShardSlice> slices;
  std::vector<int> ranks;
  int64_t numel = 0;
  for (const auto& [slice, holders] : whole.holders) {
    slices.push_back(slice);
    ranks.push_back(holders[0]);
    numel += slice.numel();
  }
  if (const auto overlap = find_overlap(slices)) {
    const auto [a, b] = *overlap;
    throw ValueError(fmt::format("save: '{}': rank {} holds {} and rank {} holds {}, which overlap", key, ranks[a],
                                 slices[a].to_string(), ranks[b], slices[b].to_string()));
  }
  TESSERA_CHECK(ValueError, numel == num_elements(whole.first->sizes),
                "save: '{}': the ranks that save it together hold {} of its {} elements", key, numel,
                num_elements(whole.first->sizes));
}

/// Tensors of one file, in the order of their bytes.
struct FileContent {
  Section section = Section::Model;
  int64_t bytes = 0;
  std::vector<const Whole*> tensors;
};

std::vector<FileContent> distribute_over_files(const Wholes& wholes, const LayoutOptions& options) {
  std::vector<FileContent> files;
  for (const auto& [key, whole] : wholes) {
    const int64_t bytes = num_elements(whole.first->sizes) * item_bytes(whole.first->dtype);
    const bool is_full =
        files.empty() || (options.single_file.empty() &&
                          (files.back().section != key.first ||
                           files.back().bytes > options.max_file_bytes - std::min(bytes, options.max_file_bytes)));
    if (is_full) {
      files.push_back({.section = key.first, .bytes = 0, .tensors = {}});
    }
    files.back().bytes += bytes;
    files.back().tensors.push_back(&whole);
  }
  // Larger elements first, so that each tensor is aligned to its element size.
  for (auto& file : files) {
    std::ranges::stable_sort(file.tensors, std::greater(),
                             [](const Whole* whole) { return item_bytes(whole->first->dtype); });
  }
  return files;
}

SafetensorsHeader make_header(const FileContent& content) {
  SafetensorsHeader header{.entries = {}, .metadata = {{"format", "pt"}}};
  uint64_t begin = 0;
  for (const Whole* whole : content.tensors) {
    const ShardEntry& entry = *whole->first;
    const auto bytes = static_cast<uint64_t>(num_elements(entry.sizes) * item_bytes(entry.dtype));
    header.entries.push_back({.key = file_key(entry.section, entry.key),
                              .dtype = entry.dtype,
                              .sizes = entry.sizes,
                              .begin = begin,
                              .end = begin + bytes});
    begin += bytes;
  }
  return header;
}

std::vector<PlannedFile> plan_files(const std::vector<FileContent>& contents, const LayoutOptions& options) {
  std::map<Section, size_t> totals, counts;
  for (const auto& content : contents) {
    ++totals[content.section];
  }
  std::vector<PlannedFile> files;
  for (const auto& content : contents) {
    PlannedFile file{
        .name = options.single_file, .section = content.section, .header = make_header(content), .header_bytes = {}};
    if (file.name.empty()) {
      file.name = fmt::format("{}-{:05}-of-{:05}.safetensors", section_name(content.section), ++counts[content.section],
                              totals[content.section]);
    }
    file.header_bytes = format_safetensors_header(file.header);
    files.push_back(std::move(file));
  }
  return files;
}

/// Block, and the ranks that may write it.
struct Choice {
  PlannedBlock block;
  std::span<const int> ranks;
};

/// Assigns blocks that several ranks may write to the one with the least data so far; blocks with one rank come first.
std::vector<PlannedBlock> choose_owners(std::vector<Choice> choices, const SavePlan& plan, size_t ranks) {
  std::vector<int64_t> load(ranks, 0);
  for (const bool shared : {false, true}) {
    for (auto& [block, own] : choices) {
      if ((own.size() > 1) == shared) {
        block.owner = *std::ranges::min_element(own, [&](int a, int b) {
          return std::pair(load[static_cast<size_t>(a)], a) < std::pair(load[static_cast<size_t>(b)], b);
        });
        load[static_cast<size_t>(block.owner)] += plan.block_bytes(block);
      }
    }
  }
  std::vector<PlannedBlock> blocks;
  blocks.reserve(choices.size());
  for (auto& choice : choices) {
    blocks.push_back(std::move(choice.block));
  }
  return blocks;
}

/// Returns the holders of a shard that may write it, in rank order.
std::span<const int> may_write(const Whole& whole, const std::vector<int>& holders) {
  return std::span(holders).first(whole.first->is_plain ? 1 : holders.size());
}

}  // namespace

std::string format_shard_entries(const std::vector<ShardEntry>& entries) {
  std::string text;
  for (const auto& entry : entries) {
    append_field(text, static_cast<int64_t>(entry.section));
    append_field(text, entry.key);
    append_field(text, static_cast<int64_t>(entry.dtype));
    append_field(text, entry.sizes);
    append_field(text, entry.slice.offsets);
    append_field(text, entry.slice.sizes);
    append_field(text, static_cast<int64_t>(entry.is_plain));
    append_field(text, static_cast<int64_t>(entry.mesh));
  }
  return text;
}

std::vector<ShardEntry> parse_shard_entries(const std::string& text) {
  std::vector<ShardEntry> entries;
  for (FieldReader reader(text); !reader.at_end();) {
    ShardEntry& entry = entries.emplace_back();
    entry.section = static_cast<Section>(reader.number());
    entry.key = reader.text();
    entry.dtype = static_cast<c10::ScalarType>(reader.number());
    entry.sizes = reader.numbers();
    entry.slice.offsets = reader.numbers();
    entry.slice.sizes = reader.numbers();
    entry.is_plain = reader.number() != 0;
    entry.mesh = static_cast<uint64_t>(reader.number());
  }
  return entries;
}

SavePlan make_save_plan(const std::vector<std::vector<ShardEntry>>& entries, const LayoutOptions& options) {
  const Wholes wholes = collect(entries);
  for (const auto& [key, whole] : wholes) {
    check_saved_parts(file_key(key.first, key.second), whole);
  }
  const auto contents = distribute_over_files(wholes, options);
  SavePlan plan{.files = plan_files(contents, options), .blocks = {}};
  std::vector<Choice> choices;
  for (size_t f = 0; f < contents.size(); ++f) {
    for (size_t e = 0; e < contents[f].tensors.size(); ++e) {
      const Whole& whole = *contents[f].tensors[e];
      const int64_t max_numel = std::max<int64_t>(1, options.max_block_bytes / item_bytes(whole.first->dtype));
      for (const auto& [slice, ranks] : whole.holders) {
        for (auto& part : split_slice(slice, max_numel)) {
          choices.push_back({.block = {.file = f, .entry = e, .slice = std::move(part), .owner = 0},
                             .ranks = may_write(whole, ranks)});
        }
      }
    }
  }
  plan.blocks = choose_owners(std::move(choices), plan, entries.size());
  return plan;
}

}  // namespace tessera::dcp
