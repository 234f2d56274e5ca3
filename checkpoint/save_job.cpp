#include "checkpoint/save_job.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <random>

#include "checkpoint/checkpoint_error.h"
#include "checkpoint/file_io.h"
#include "checkpoint/manifest.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

/// What a rank tells the others when its bytes are on the disk.
struct Written {
  std::vector<uint64_t> hashes;  // of its blocks, in the plan's order
  std::map<Section, Values> values;
};

/// Hashes, 16 digits each, then a blank and the values.
std::string format_written(const Written& written) {
  std::string text;
  for (const uint64_t hash : written.hashes) {
    text += fmt::format("{:016x}", hash);
  }
  return text + " " + format_values(written.values);
}

Written parse_written(const std::string& text) {
  const size_t end = text.find(' ');
  Written written;
  for (size_t i = 0; i < end; i += 16) {
    written.hashes.push_back(std::stoull(text.substr(i, 16), nullptr, 16));
  }
  written.values = parse_values(std::string_view(text).substr(end + 1), "save");
  return written;
}

/// What a save that was killed left behind.
void remove_incomplete(const std::string& path) {
  const std::string prefix = fs::path(path).filename().string() + kIncomplete;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(parent_folder(path), error)) {
    if (entry.path().filename().string().starts_with(prefix)) {
      fs::remove_all(entry.path(), error);
    }
  }
}

/// Whether the folder, or single file, can get the name at the end: in place of nothing or of an empty folder, which a
/// link to one is not.
bool is_free(const SaveJob& job) {
  const fs::file_status status = fs::symlink_status(job.path);
  return job.is_single_file ? !fs::is_directory(job.path)
                            : !fs::exists(status) || (fs::is_directory(status) && fs::is_empty(job.path));
}

/// Rank 0: the folder in which the save comes into being, with all files at their full length.
std::string prepare_files(const SaveJob& job) {
  TESSERA_CHECK(ValueError, !job.path.empty(), "save: the path is empty; give a folder, or a file to export to");
  TESSERA_CHECK(CheckpointError, is_free(job),
                "{}: there is something already; save under a new name, or remove it before", job.path);
  remove_incomplete(job.path);
  std::string folder = fmt::format("{}{}{:08x}", job.path, kIncomplete, std::random_device()());
  make_folder(folder);
  try {
    for (const auto& file : job.plan->files) {
      File::create(folder + "/" + file.name, file.bytes()).write(file.header_bytes.data(), file.header_bytes.size(), 0);
    }
  } catch (...) {
    std::error_code error;
    fs::remove_all(folder, error);
    throw;
  }
  return folder;
}

/// Writes this rank's blocks; rank 0, which wrote the headers, syncs every file.
std::vector<uint64_t> write_blocks(const SaveJob& job, const std::string& folder, int rank) {
  const SavePlan& plan = *job.plan;
  std::vector<std::optional<File>> files(plan.files.size());
  const auto file_at = [&](size_t i) -> const File& {
    if (!files[i]) {
      files[i] = File::open_to_write(folder + "/" + plan.files[i].name);
    }
    return *files[i];
  };
  Progress progress;
  const auto bytes_of = [&](const PlannedBlock& block) {
    return block.box.numel() * static_cast<int64_t>(c10::elementSize(plan.entry_of(block).dtype));
  };
  for (const auto& own : job.blocks) {
    progress.bytes_total += bytes_of(plan.blocks[own.block]);
  }
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i < job.blocks.size(); ++i) {
    const PlannedBlock& block = plan.blocks[job.blocks[i].block];
    const SafetensorsEntry& entry = plan.entry_of(block);
    const at::Tensor data = job.data(i);
    hashes.push_back(hash_bytes(data.const_data_ptr(), data.nbytes()));
    write_box(file_at(block.file),
              {.offset = plan.files[block.file].header_bytes.size() + entry.begin,
               .sizes = entry.sizes,
               .item_bytes = static_cast<int64_t>(c10::elementSize(entry.dtype))},
              block.box, data.const_data_ptr());
    progress.bytes_done += bytes_of(block);
    if (job.progress) {
      job.progress(progress);
    }
  }
  for (size_t i = 0; i < files.size(); ++i) {
    if (rank == 0 || files[i]) {
      file_at(i).sync();
    }
  }
  return hashes;
}

/// All ranks' values; the same key with two values is an error.
std::map<Section, Values> merge_values(const std::vector<Written>& written) {
  std::map<Section, Values> merged;
  std::map<std::string, size_t> origin;
  for (size_t rank = 0; rank < written.size(); ++rank) {
    for (const auto& [section, values] : written[rank].values) {
      for (const auto& [key, value] : values) {
        const auto [place, is_new] = merged[section].emplace(key, value);
        const auto [first, unused] = origin.emplace(file_key(section, key), rank);
        const auto text = [section = section, key = key](const Value& v) {
          return format_values({{section, {{key, v}}}});
        };
        TESSERA_CHECK(
            ValueError, is_new || text(place->second) == text(value),
            "save: '{}' differs between ranks: rank {} has {}, rank {} has {}. Give each rank a key of its own",
            file_key(section, key), first->second, text(place->second), rank, text(value));
      }
    }
  }
  return merged;
}

Manifest make_manifest(const SavePlan& plan, const std::vector<Written>& written) {
  Manifest manifest{.files = {}, .values = merge_values(written)};
  for (const auto& file : plan.files) {
    auto& entry = manifest.files[file.name];
    entry = {.section = file.section,
             .bytes = file.bytes(),
             .header_hash = hash_bytes(file.header_bytes.data(), file.header_bytes.size()),
             .tensors = {}};
    for (const auto& tensor : file.header.entries) {
      entry.tensors[tensor.key];
    }
  }
  std::vector<size_t> next(written.size(), 0);
  for (const auto& block : plan.blocks) {
    const auto owner = static_cast<size_t>(block.owner);
    manifest.files[plan.files[block.file].name].tensors[plan.entry_of(block).key].push_back(
        {.box = block.box, .hash = written[owner].hashes[next[owner]++]});
  }
  return manifest;
}

std::string make_index(const SavePlan& plan) {
  std::map<std::string, std::string> weight_map;
  uint64_t total_bytes = 0;
  for (const auto& file : plan.files) {
    if (file.section == Section::Model) {
      for (const auto& entry : file.header.entries) {
        weight_map[entry.key] = file.name;
        total_bytes += entry.end - entry.begin;
      }
    }
  }
  return format_index(weight_map, total_bytes);
}

/// Rank 0: the last files, and the name.
void commit(const SaveJob& job, const std::string& folder, const std::vector<std::string>& texts) {
  std::vector<Written> written;
  written.reserve(texts.size());
  for (const auto& text : texts) {
    written.push_back(parse_written(text));
  }
  if (job.is_single_file) {
    rename_durably(folder + "/" + job.plan->files.at(0).name, job.path);
    fs::remove(folder);
    return;
  }
  const auto manifest = format_manifest(make_manifest(*job.plan, written));
  write_text(folder + "/" + kIndexName, make_index(*job.plan));
  write_text(folder + "/" + kManifestName, manifest);
  sync_folder(folder);
  rename_durably(folder, job.path);
}

}  // namespace

void run_save(const Ranks& ranks, const SaveJob& job) {
  const std::string folder = ranks.from_first([&] { return prepare_files(job); });
  try {
    const auto texts = ranks.exchange(
        [&] { return format_written({.hashes = write_blocks(job, folder, ranks.rank()), .values = job.values}); });
    ranks.from_first([&] {
      commit(job, folder, texts);
      return std::string();
    });
  } catch (...) {
    if (ranks.rank() == 0) {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
    }
    throw;
  }
}

}  // namespace tessera::dcp
