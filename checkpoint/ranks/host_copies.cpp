#include "checkpoint/ranks/host_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <filesystem>
#include <optional>
#include <vector>

#include "checkpoint/format/checkpoint_error.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/io/checkpoint_index.h"
#include "checkpoint/io/file_io.h"

namespace tessera::dcp {

namespace {

namespace fs = std::filesystem;

struct Block {
  const StoredTensor* tensor;
  const StoredPart* part;
  const CheckedBlock* checked;

  int64_t bytes() const { return checked->slice.numel() * item_bytes(tensor->dtype); }
  TensorBytes place() const {
    return {.offset = part->offset, .sizes = part->slice.sizes, .item_bytes = item_bytes(tensor->dtype)};
  }
  bool is_valid(const at::Tensor& data) const {
    return hash_bytes(data.const_data_ptr(), data.nbytes()) == checked->hash;
  }
  at::Tensor read() const {
    at::Tensor data = at::empty({bytes()}, at::kByte);
    read_slice(File::open(part->file), place(), relative_to(checked->slice, part->slice), data.mutable_data_ptr());
    return data;
  }
  void write(const at::Tensor& data) const {
    write_slice(File::open_to_write(part->file), place(), relative_to(checked->slice, part->slice),
                data.const_data_ptr());
  }
};

/// Returns all blocks, in the same order on all hosts.
std::vector<Block> blocks_of(const CheckpointIndex& index) {
  std::vector<Block> blocks;
  for (const auto& [section, tensors] : index.tensors) {
    for (const auto& [key, tensor] : tensors) {
      for (const auto& part : tensor.parts) {
        for (const auto& block : part.blocks) {
          blocks.push_back({.tensor = &tensor, .part = &part, .checked = &block});
        }
      }
    }
  }
  return blocks;
}

void append(std::string& texts, const std::string& text) {
  texts += fmt::format("{} {}", text.size(), text);
}

/// Reverses append().
std::string take(std::string& texts) {
  const size_t blank = texts.find(' ');
  const size_t size = std::stoull(texts.substr(0, blank));
  std::string text = texts.substr(blank + 1, size);
  texts.erase(0, blank + 1 + size);
  return text;
}

/// Returns the manifest, and the header of each of its files.
std::string read_frame(const std::string& folder) {
  const auto file = (fs::path(folder) / kManifestName).string();
  const std::string manifest = read_text(file, fs::file_size(file));
  std::string frame;
  append(frame, manifest);
  for (const auto& [name, entry] : parse_manifest(manifest, file).files) {
    const File data = File::open((fs::path(folder) / name).string());
    uint64_t length = 0;  // of the header, which it precedes in a safetensors file
    data.read(&length, sizeof length, 0);
    TESSERA_CHECK(CheckpointError, length < entry.bytes, "{}: its header has {} bytes, more than the file", data.path(),
                  length);
    std::string header(sizeof length + length, '\0');
    data.read(header.data(), header.size(), 0);
    append(frame, header);
  }
  return frame;
}

/// Creates the files at their full length, without data of tensors.
void make_frame(const std::string& folder, std::string frame) {
  fs::remove_all(folder);
  make_folder(folder);
  const std::string manifest = take(frame);
  for (const auto& [name, entry] : parse_manifest(manifest, kManifestName).files) {
    const std::string header = take(frame);
    File::create((fs::path(folder) / name).string(), entry.bytes).write(header.data(), header.size(), 0);
  }
  write_text((fs::path(folder) / kManifestName).string(), manifest);
}

class HostCopies {
 public:
  HostCopies(const RankSync& ranks, const HostRanks& hosts, std::string path)
      : ranks_(ranks), hosts_(hosts), path_(std::move(path)) {}

  /// Throws CheckpointError on all ranks.
  void complete() {
    open();
    fetch(find_holders());
    ranks_.on_all_ranks([&] {
      if (hosts_.leads() && folder_ != path_) {
        rename_durably(folder_, path_);
      }
    });
  }

 private:
  /// Creates the folder on hosts that have none.
  void open() {
    const auto holds = ranks_.exchange(
        [&] { return std::string(hosts_.leads() && fs::exists(fs::path(path_) / kManifestName) ? "1" : ""); });
    const auto first = static_cast<int>(std::ranges::find(holds, "1") - holds.begin());
    const auto frames = ranks_.exchange([&] { return ranks_.rank() == first ? read_frame(path_) : std::string(); });
    folder_ = holds[static_cast<size_t>(hosts_.leader())] == "1" ? path_ : path_ + kIncomplete + "copy";
    ranks_.on_all_ranks([&] {
      if (hosts_.leads() && folder_ != path_) {
        make_frame(folder_, frames.at(static_cast<size_t>(first)));
      }
    });
    ranks_.on_all_ranks([&] { index_ = open_checkpoint(folder_); });
    blocks_ = blocks_of(index_);
  }

  /// Returns, by block and host, whether the host has the block's data.
  std::vector<std::vector<bool>> find_holders() {
    const size_t ranks_here = hosts_.hosts[hosts_.own].size();
    const auto texts = ranks_.exchange([&] {
      std::string text;
      for (size_t i = hosts_.place; i < blocks_.size(); i += ranks_here) {
        text += folder_ == path_ && blocks_[i].is_valid(blocks_[i].read()) ? '1' : '0';
      }
      return text;
    });
    std::vector<std::vector<bool>> holders(blocks_.size(), std::vector<bool>(hosts_.hosts.size()));
    for (size_t i = 0; i < blocks_.size(); ++i) {
      for (size_t host = 0; host < hosts_.hosts.size(); ++host) {
        const auto& own = hosts_.hosts[host];
        holders[i][host] = texts.at(static_cast<size_t>(own[i % own.size()])).at(i / own.size()) == '1';
      }
      TESSERA_CHECK(CheckpointError, std::ranges::find(holders[i], true) != holders[i].end(),
                    "{}: no host has all of it", path_);
    }
    return holders;
  }

  /// Copies each block from the first host that has it. All ranks use one order of blocks, which prevents deadlocks.
  void fetch(const std::vector<std::vector<bool>>& holders) {
    const auto rank_for = [&](size_t host, size_t i) { return hosts_.hosts[host][i % hosts_.hosts[host].size()]; };
    std::string failure;
    const auto try_to = [&](const auto& step) {  // a peer waits for each message, also after an error
      try {
        step();
      } catch (const CheckpointError& error) {
        failure = failure.empty() ? error.what() : failure;
      }
    };
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const auto holder = static_cast<size_t>(std::ranges::find(holders[i], true) - holders[i].begin());
      for (size_t host = 0; host < hosts_.hosts.size(); ++host) {
        const int from = rank_for(holder, i), to = rank_for(host, i);
        if (holders[i][host] || blocks_[i].bytes() == 0 || (ranks_.rank() != from && ranks_.rank() != to)) {
          continue;
        }
        at::Tensor data = at::empty({blocks_[i].bytes()}, at::kByte);
        if (ranks_.rank() == from) {
          try_to([&] { data = blocks_[i].read(); });
          ranks_.send(data, to);
        } else {
          ranks_.receive(data, from);
          try_to([&] { blocks_[i].write(data); });
        }
      }
    }
    ranks_.on_all_ranks([&] { TESSERA_CHECK(CheckpointError, failure.empty(), "{}", failure); });
  }

  const RankSync& ranks_;
  const HostRanks& hosts_;
  const std::string path_;
  std::string folder_;  // path_, or the temporary folder that will be renamed to it
  CheckpointIndex index_;
  std::vector<Block> blocks_;
};

}  // namespace

std::string complete_on_hosts(const RankSync& ranks, const HostRanks& hosts, const std::string& path) {
  RECORD_USER_SCOPE("checkpoint: complete on all hosts");
  try {
    HostCopies(ranks, hosts, path).complete();
    return "";
  } catch (const CheckpointError& error) {
    return error.what();
  }
}

}  // namespace tessera::dcp
