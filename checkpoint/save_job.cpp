#include "checkpoint/save_job.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string_view>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/io/file_io.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

/// Formats hashes with 16 digits each.
std::string format_hashes(const std::vector<uint64_t>& hashes) {
  std::string text;
  for (const uint64_t hash : hashes) {
    text += fmt::format("{:016x}", hash);
  }
  return text;
}

std::vector<uint64_t> parse_hashes(const std::string& text) {
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i < text.size(); i += 16) {
    hashes.push_back(std::stoull(text.substr(i, 16), nullptr, 16));
  }
  return hashes;
}

/// Returns the suffix after kIncomplete in folders that this process writes: a random number, drawn once.
const std::string& process_mark() {
  static const std::string mark = fmt::format("{:08x}-", std::random_device()());
  return mark;
}

/// Returns whether the folder, or single file, can be renamed to the final path: nothing is there, or an empty folder,
/// but not a link to one.
bool is_free(const SaveJob& job) {
  const fs::file_status status = fs::symlink_status(job.path);
  return job.is_single_file ? !fs::is_directory(job.path)
                            : !fs::exists(status) || (fs::is_directory(status) && fs::is_empty(job.path));
}

/// Runs on the first rank of a host: creates the temporary folder, with all files at their full length.
std::string prepare_files(const SaveJob& job) {
  RECORD_USER_SCOPE("checkpoint: prepare files");
  TESSERA_CHECK(ValueError, !job.path.empty(), "save: the path is empty; give a folder, or a file to export to");
  TESSERA_CHECK(CheckpointError, is_free(job),
                "{}: there is something already; save under a new name, or remove it before", job.path);
  remove_leftovers(parent_folder(job.path),
                   [own = fs::path(job.path).filename()](const std::string& name) { return name == own; });
  std::string folder = fmt::format("{}{}{}{:08x}", job.path, kIncomplete, process_mark(), std::random_device()());
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

/// Files of a save. Only one is open at a time, because there may be more than a process may open.
class FilesToWrite {
 public:
  FilesToWrite(const SavePlan& plan, const std::string& folder) : plan_(plan), folder_(folder) {}

  /// Writes a block. Starts writing to disk every few MB.
  void write(const PlannedBlock& block, const void* data) {
    const SafetensorsEntry& entry = plan_.entry(block);
    const TensorBytes bytes{.offset = plan_.files[block.file].header_bytes.size() + entry.begin,
                            .sizes = entry.sizes,
                            .item_bytes = item_bytes(entry.dtype)};
    const File& file = at(block.file);
    write_slice(file, bytes, block.slice, data);
    const Run all = extent(block.slice, entry.sizes);
    const uint64_t begin = bytes.offset + static_cast<uint64_t>(all.in_tensor * bytes.item_bytes);
    const uint64_t end = begin + static_cast<uint64_t>(all.numel * bytes.item_bytes);
    unsynced_begin_ = std::min(unsynced_begin_, begin);
    if (end >= unsynced_begin_ + kSyncBytes) {
      file.begin_sync(end - unsynced_begin_, unsynced_begin_);
      unsynced_begin_ = end;
    }
  }
  /// Syncs the files that were written; with `all`, also the rest.
  void sync(bool all) {
    for (size_t i = 0; i < plan_.files.size(); ++i) {
      if (all || written_.count(i) == 1) {
        at(i).sync();
      }
    }
  }

 private:
  static constexpr uint64_t kSyncBytes = uint64_t{4} << 20;

  /// Returns file `i`, and closes the previous one.
  const File& at(size_t i) {
    if (!file_ || place_ != i) {
      file_.reset();
      file_ = File::open_to_write(folder_ + "/" + plan_.files[i].name);
      place_ = i;
      unsynced_begin_ = UINT64_MAX - kSyncBytes;
      written_.insert(i);
    }
    return *file_;
  }

  const SavePlan& plan_;
  const std::string& folder_;
  std::optional<File> file_;
  size_t place_ = 0;
  uint64_t unsynced_begin_ = 0;  // offset in the open file from which writing to disk was not started yet
  std::set<size_t> written_;
};

/// Writes this rank's blocks, in the order of files. The first rank of a host, which wrote the headers (`leads`), syncs
/// every file.
std::vector<uint64_t> write_blocks(const SaveJob& job, const std::string& folder, bool leads) {
  RECORD_USER_SCOPE("checkpoint: write");
  const SavePlan& plan = *job.plan;
  FilesToWrite files(plan, folder);
  Progress progress;
  for (const auto& own : job.blocks) {
    progress.bytes_total += plan.block_bytes(plan.blocks[own.block]);
  }
  std::vector<uint64_t> hashes;
  for (size_t i = 0; i < job.blocks.size(); ++i) {
    const PlannedBlock& block = plan.blocks[job.blocks[i].block];
    const at::Tensor data = job.data(i);
    hashes.push_back(hash_bytes(data.const_data_ptr(), data.nbytes()));
    files.write(block, data.const_data_ptr());
    progress.bytes_done += plan.block_bytes(block);
    if (job.progress) {
      job.progress(progress);
    }
  }
  files.sync(/*all=*/leads);
  return hashes;
}

/// Sends this rank's blocks to the next host, and writes the blocks that this rank keeps for the previous host.
/// Collective.
void exchange_copies(const RankSync& ranks, const HostRanks& hosts, const SaveJob& job, const std::string& folder) {
  RECORD_USER_SCOPE("checkpoint: copies on the next host");
  const SavePlan& plan = *job.plan;
  std::vector<at::Tensor> sent;
  std::vector<Pending> pending;
  for (size_t i = 0; i < job.blocks.size(); ++i) {
    sent.push_back(job.data(i));
    if (sent.back().numel() > 0) {
      const at::Tensor bytes =
          at::from_blob(sent.back().mutable_data_ptr(), {static_cast<int64_t>(sent.back().nbytes())}, at::kByte);
      pending.push_back(ranks.send_async(bytes, hosts.keeper_of(ranks.rank())));
    }
  }
  std::exception_ptr failure;  // thrown later, since peers wait for this rank's messages
  FilesToWrite files(plan, folder);
  for (int from = 0; from < ranks.size(); ++from) {
    for (const auto& block : plan.blocks) {
      if (block.owner != from || hosts.keeper_of(from) != ranks.rank() || plan.block_bytes(block) == 0) {
        continue;
      }
      const at::Tensor bytes = at::empty({plan.block_bytes(block)}, at::kByte);
      ranks.receive(bytes, from);
      try {
        files.write(block, bytes.const_data_ptr());
      } catch (const CheckpointError&) {
        failure = std::current_exception();
      }
    }
  }
  for (auto& message : pending) {
    message.wait();
  }
  ranks.on_all_ranks([&] {
    if (failure) {
      std::rethrow_exception(failure);
    }
  });
}

/// `texts[rank]` has the hashes of the rank's blocks, in the plan's order.
Manifest make_manifest(const SaveJob& job, const std::vector<std::string>& texts) {
  const SavePlan& plan = *job.plan;
  std::vector<std::vector<uint64_t>> hashes;
  hashes.reserve(texts.size());
  for (const auto& text : texts) {
    hashes.push_back(parse_hashes(text));
  }
  Manifest manifest{.files = {}, .values = job.values};
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
  std::vector<size_t> next(hashes.size(), 0);
  for (const auto& block : plan.blocks) {
    const auto owner = static_cast<size_t>(block.owner);
    manifest.files[plan.files[block.file].name].tensors[plan.entry(block).key].push_back(
        {.slice = block.slice, .hash = hashes[owner][next[owner]++]});
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

/// Runs on the first rank of a host: writes the last files, and renames the folder.
void commit(const SaveJob& job, const std::string& folder, const std::string& manifest) {
  RECORD_USER_SCOPE("checkpoint: commit");
  if (job.is_single_file) {
    rename_durably(folder + "/" + job.plan->files.at(0).name, job.path);
    std::error_code ignored;  // the file exists
    fs::remove(folder, ignored);
    return;
  }
  write_text(folder + "/" + kIndexName, make_index(*job.plan));
  write_text(folder + "/" + kManifestName, manifest);
  sync_folder(folder);
  rename_durably(folder, job.path);
}

}  // namespace

void remove_leftovers(const std::string& folder, const std::function<bool(const std::string& name)>& is_ours) {
  std::vector<fs::path> leftovers;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const auto name = entry.path().filename().string();
    const auto end = name.find(kIncomplete);
    if (end != std::string::npos && is_ours(name.substr(0, end)) &&
        !std::string_view(name).substr(end + std::strlen(kIncomplete)).starts_with(process_mark())) {
      leftovers.push_back(entry.path());
    }
  }
  for (const auto& leftover : leftovers) {
    fs::remove_all(leftover, ignored);
  }
}

void run_save(const RankSync& ranks, const HostRanks& hosts, const SaveJob& job) {
  std::string own_folder;  // set on the first rank of a host
  try {
    const auto folders = ranks.exchange([&] {
      own_folder = hosts.leads() ? prepare_files(job) : "";
      return own_folder;
    });
    const auto& folder = folders[static_cast<size_t>(hosts.leader())];
    const auto texts = ranks.exchange([&] { return format_hashes(write_blocks(job, folder, hosts.leads())); });
    const auto format = [&] { return job.is_single_file ? "" : format_manifest(make_manifest(job, texts)); };
    if (hosts.is_one()) {
      ranks.on_rank0([&] { commit(job, folder, format()); });
      return;
    }
    exchange_copies(ranks, hosts, job, folder);
    const auto manifest = ranks.from_rank0(format);
    ranks.on_all_ranks([&] {
      if (hosts.leads()) {
        commit(job, folder, manifest);
      }
    });
  } catch (...) {
    if (!own_folder.empty()) {
      std::error_code ignored;
      fs::remove_all(own_folder, ignored);
    }
    throw;
  }
}

void run_save(const RankSync& ranks, const SaveJob& job) {
  run_save(ranks, one_host(ranks), job);
}

}  // namespace tessera::dcp
