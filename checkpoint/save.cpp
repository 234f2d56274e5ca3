#include <algorithm>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/save_job.h"

namespace tessera::dcp {

namespace {

std::vector<Piece> checked_pieces(const std::vector<LocalPart>& parts) {
  for (const auto& part : parts) {
    TESSERA_CHECK(ValueError, !part.key.empty() && part.key != "__metadata__",
                  "save: '{}' is no name for a tensor in a safetensors file", part.key);
    try {
      safetensors_dtype(part.local.scalar_type());
    } catch (const NotImplementedError& error) {
      throw NotImplementedError(fmt::format("save: '{}': {}", file_key(part.section, part.key), error.what()));
    }
  }
  return pieces_of(parts);
}

std::string without_trailing_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') {
    path.pop_back();
  }
  return path;
}

}  // namespace

PlannedSave plan_save(const Ranks& ranks, const State& state, const LayoutOptions& layout, PlanCache* cache) {
  PlannedSave planned;
  std::string own;
  const auto describe = [&] {
    planned.parts = local_parts(state);
    own = format_pieces(checked_pieces(planned.parts));
    return own;
  };
  if (cache) {
    const auto hits = ranks.exchange([&] {
      describe();
      return std::string(cache->plan && cache->pieces_hash == hash_bytes(own.data(), own.size()) ? "hit" : "miss");
    });
    if (std::all_of(hits.begin(), hits.end(), [](const std::string& hit) { return hit == "hit"; })) {
      planned.plan = cache->plan;
      return planned;
    }
  }
  std::vector<std::vector<Piece>> pieces;
  for (const auto& text : ranks.exchange([&] { return cache ? own : describe(); })) {
    pieces.push_back(parse_pieces(text));
  }
  planned.plan = std::make_shared<const SavePlan>(make_save_plan(pieces, layout));
  if (cache) {
    *cache = {.pieces_hash = hash_bytes(own.data(), own.size()), .plan = planned.plan};
  }
  return planned;
}

std::vector<OwnBlock> own_blocks(const PlannedSave& planned, int rank) {
  std::map<std::pair<Section, std::string>, size_t> part_of;
  for (size_t i = 0; i < planned.parts.size(); ++i) {
    part_of[{planned.parts[i].section, file_key(planned.parts[i].section, planned.parts[i].key)}] = i;
  }
  std::vector<OwnBlock> own;
  const auto& plan = *planned.plan;
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    if (plan.blocks[i].owner == rank) {
      const auto& entry = plan.entry_of(plan.blocks[i]);
      own.push_back({.block = i, .part = part_of.at({plan.files[plan.blocks[i].file].section, entry.key})});
    }
  }
  return own;
}

SaveJob live_job(const Ranks& ranks, const std::string& path, const PlannedSave& planned, const State& state) {
  SaveJob job{.path = without_trailing_slash(path),
              .plan = planned.plan,
              .blocks = own_blocks(planned, ranks.rank()),
              .data = {},
              .values = values_of(state),
              .progress = {}};
  job.data = [&planned, blocks = job.blocks](size_t i) {
    return host_copy(planned.parts[blocks[i].part], planned.plan->blocks[blocks[i].block].box);
  };
  return job;
}

void save(const std::string& path, const State& state, const SaveOptions& options) {
  const Ranks ranks = Ranks::all();
  PlannedSave planned = plan_save(ranks, state, {.max_file_bytes = options.max_file_bytes});
  SaveJob job = live_job(ranks, path, planned, state);
  job.progress = options.progress;
  run_save(ranks, job);
}

void export_safetensors(const std::string& file, const StateDict& model, const SaveOptions& options) {
  const Ranks ranks = Ranks::all();
  const State state{.model = model};
  const auto counts = ranks.exchange([&] {
    TESSERA_CHECK(ValueError, values_of(state).empty(),
                  "export_safetensors: the model's state has values; a safetensors file "
                  "holds tensors only");
    return std::string(model.empty() ? "none" : "some");
  });
  TESSERA_CHECK(ValueError,
                std::any_of(counts.begin(), counts.end(), [](const auto& count) { return count == "some"; }),
                "export_safetensors: no rank has a tensor to export");
  PlannedSave planned = plan_save(ranks, state, {.single_file = "model.safetensors"});
  SaveJob job = live_job(ranks, file, planned, state);
  job.is_single_file = true;
  job.progress = options.progress;
  run_save(ranks, job);
}

}  // namespace tessera::dcp
