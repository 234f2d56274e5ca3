#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/merge_values.h"
#include "checkpoint/save_job.h"

namespace tessera::dcp {

namespace {

std::vector<ShardEntry> checked_entries(const std::vector<LocalPart>& parts) {
  for (const auto& part : parts) {
    TESSERA_CHECK(ValueError, !part.key.empty() && part.key != "__metadata__",
                  "save: '{}' is no name for a tensor in a safetensors file", part.key);
    try {
      safetensors_dtype(part.local.scalar_type());
    } catch (const NotImplementedError& error) {
      throw NotImplementedError(fmt::format("save: '{}': {}", file_key(part.section, part.key), error.what()));
    }
  }
  return make_shard_entries(parts);
}

std::string without_trailing_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') {
    path.pop_back();
  }
  return path;
}

/// Data that ranks exchange before they plan.
struct SaveProposal {
  bool has_plan = false;  // whether the plan of the last save fits these entries
  int64_t max_file_bytes = 0;
  std::string path;
  std::string values;  // from summarize_values
};

/// Fields end with a zero byte. The values contain none, so the path may contain some.
std::string format_proposal(const SaveProposal& proposal) {
  return fmt::format("{}{}", proposal.has_plan ? '+' : '-', proposal.max_file_bytes) + '\0' + proposal.path + '\0' +
         proposal.values;
}

SaveProposal parse_proposal(const std::string& text) {
  const size_t path = text.find('\0') + 1, values = text.rfind('\0') + 1;
  return {.has_plan = text[0] == '+',
          .max_file_bytes = std::stoll(text.substr(1, path - 2)),
          .path = text.substr(path, values - path - 1),
          .values = text.substr(values)};
}

void check_proposals_agree(const std::vector<SaveProposal>& proposals) {
  for (size_t rank = 1; rank < proposals.size(); ++rank) {
    TESSERA_CHECK(ValueError, proposals[rank].path == proposals[0].path,
                  "save: the ranks differ in the path (or step): rank 0 has '{}', rank {} has '{}'", proposals[0].path,
                  rank, proposals[rank].path);
    TESSERA_CHECK(ValueError, proposals[rank].max_file_bytes == proposals[0].max_file_bytes,
                  "save: the ranks differ in max_file_bytes: rank 0 has {}, rank {} has {}",
                  proposals[0].max_file_bytes, rank, proposals[rank].max_file_bytes);
  }
}

}  // namespace

PlannedSave plan_save(const RankSync& ranks, const State& state, const SaveRequest& request) {
  RECORD_USER_SCOPE("checkpoint: plan");
  PlannedSave planned{.path = without_trailing_slash(request.path), .parts = {}, .plan = {}, .values = {}};
  PlanCache* const cache = request.cache;
  std::string own;
  std::vector<SaveProposal> proposals;
  std::vector<std::string> summaries;
  for (const auto& text : ranks.exchange([&] {
         planned.parts = local_parts(state);
         planned.values = collect_values(state);
         own = format_shard_entries(checked_entries(planned.parts));
         return format_proposal(
             {.has_plan = cache && cache->plan && cache->entries_hash == hash_bytes(own.data(), own.size()),
              .max_file_bytes = request.layout.max_file_bytes,
              .path = planned.path,
              .values = summarize_values(planned.values)});
       })) {
    proposals.push_back(parse_proposal(text));
    summaries.push_back(proposals.back().values);
  }
  check_proposals_agree(proposals);
  planned.values = merge_values(ranks, std::move(planned.values), summaries);
  if (std::ranges::all_of(proposals, &SaveProposal::has_plan)) {
    planned.plan = cache->plan;
    return planned;
  }
  std::vector<std::vector<ShardEntry>> entries;
  for (const auto& text : ranks.exchange([&] { return own; })) {
    entries.push_back(parse_shard_entries(text));
  }
  planned.plan = std::make_shared<const SavePlan>(make_save_plan(entries, request.layout));
  if (cache) {
    *cache = {.entries_hash = hash_bytes(own.data(), own.size()), .plan = planned.plan};
  }
  return planned;
}

std::vector<OwnBlock> own_blocks(const PlannedSave& planned, int rank) {
  std::map<std::pair<Section, std::string>, size_t> part_indices;
  for (size_t i = 0; i < planned.parts.size(); ++i) {
    part_indices[{planned.parts[i].section, file_key(planned.parts[i].section, planned.parts[i].key)}] = i;
  }
  std::vector<OwnBlock> own;
  const auto& plan = *planned.plan;
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    if (plan.blocks[i].owner == rank) {
      const auto& entry = plan.entry(plan.blocks[i]);
      own.push_back({.block = i, .part = part_indices.at({plan.files[plan.blocks[i].file].section, entry.key})});
    }
  }
  return own;
}

SaveJob live_job(const RankSync& ranks, const PlannedSave& planned) {
  SaveJob job{.path = planned.path,
              .plan = planned.plan,
              .blocks = own_blocks(planned, ranks.rank()),
              .data = {},
              .values = planned.values,
              .progress = {}};
  job.data = [&planned, blocks = job.blocks](size_t i) {
    return host_copy(planned.parts[blocks[i].part], planned.plan->blocks[blocks[i].block].slice);
  };
  return job;
}

void save(const std::string& path, const State& state, const SaveOptions& options) {
  const RankSync ranks = RankSync::all();
  const auto planned = plan_save(ranks, state, {.path = path, .layout = {.max_file_bytes = options.max_file_bytes}});
  SaveJob job = live_job(ranks, planned);
  job.progress = options.progress;
  run_save(ranks, job);
}

void export_safetensors(const std::string& file, const StateDict& model, const SaveOptions& options) {
  const RankSync ranks = RankSync::all();
  const State state{.model = model};
  const auto counts = ranks.exchange([&] {
    TESSERA_CHECK(ValueError, collect_values(state).empty(),
                  "export_safetensors: the model's state has values; a safetensors file "
                  "holds tensors only");
    return std::string(model.empty() ? "none" : "some");
  });
  TESSERA_CHECK(ValueError,
                std::any_of(counts.begin(), counts.end(), [](const auto& count) { return count == "some"; }),
                "export_safetensors: no rank has a tensor to export");
  const auto planned = plan_save(ranks, state, {.path = file, .layout = {.single_file = "model.safetensors"}});
  SaveJob job = live_job(ranks, planned);
  job.is_single_file = true;
  job.progress = options.progress;
  run_save(ranks, job);
}

}  // namespace tessera::dcp
