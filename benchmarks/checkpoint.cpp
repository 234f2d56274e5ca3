// Cost of saving and loading compared with plain files, for 2 ranks as threads, each with shards of 32 float32 tensors.
//
//   plain_write, plain_read    each rank writes or reads its shard as one file. Writes start the disk early, as in a
//                              save, and end with fsync; reads come from the disk
//   save, load                 the same bytes through dcp::save and dcp::load
//   memcpy                     a rank copies its shard
//   async_save_blocks          time for which async_save blocks training, from the second save on
//   save_over_write, load_over_read, async_save_over_memcpy   ratios of these
//   save_extra, load_extra     peak memory of a rank in addition to its shard, in shards
//
// TMPDIR selects the disk. With PEER_PYTHON, checkpoint_peer.py also measures PyTorch's distributed checkpoint on the
// same bytes.

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/measure.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/io/file_io.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "testing/temp_folder.h"

namespace tessera {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kTensors = 32;
constexpr int64_t kRows = 1024;
constexpr int64_t kColumns = 1024;
constexpr double kShardBytes = 4.0 * kTensors * kRows * kColumns / kRanks;

struct Model {
  Model() {
    const auto mesh = init_device_mesh(at::kCPU, {kRanks}, {"dp"});
    for (int64_t i = 0; i < kTensors; ++i) {
      state.model[fmt::format("layers.{}.weight", i)] =
          distribute_tensor(at::ones({kRows, kColumns}), mesh, {Shard(0)});
    }
  }
  std::vector<at::Tensor> locals() const {
    std::vector<at::Tensor> result;
    for (const auto& [key, value] : state.model) {
      result.push_back(to_local(std::get<at::Tensor>(value)));
    }
    return result;
  }

  dcp::State state;
};

void write_plain(const std::string& path, const std::vector<at::Tensor>& tensors) {
  constexpr uint64_t kSyncBytes = uint64_t{4} << 20;  // as in a save
  const auto file = dcp::File::create(path, static_cast<uint64_t>(kShardBytes));
  uint64_t offset = 0, synced = 0;
  for (const auto& tensor : tensors) {
    file.write(tensor.const_data_ptr(), tensor.nbytes(), offset);
    offset += tensor.nbytes();
    if (offset >= synced + kSyncBytes) {
      file.begin_sync(offset - synced, synced);
      synced = offset;
    }
  }
  file.sync();
}

void read_plain(const std::string& path, const std::vector<at::Tensor>& tensors) {
  const auto file = dcp::File::open(path);
  uint64_t offset = 0;
  for (const auto& tensor : tensors) {
    file.read(tensor.mutable_data_ptr(), tensor.nbytes(), offset);
    offset += tensor.nbytes();
  }
}

/// Makes later reads of `folder` come from the disk.
void drop_from_page_cache(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const int descriptor = entry.is_regular_file() ? ::open(entry.path().c_str(), O_RDONLY) : -1;
    if (descriptor >= 0) {
      ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
      ::close(descriptor);
    }
  }
}

using Step = std::function<void()>;

/// Returns the seconds of each step on all ranks together: the fastest of `rounds`. The steps take turns, because a
/// disk's speed varies; `prepare` runs before each and is not counted.
std::vector<double> seconds_in_turns(int rounds, const Step& prepare, const std::vector<Step>& steps) {
  std::vector<double> best(steps.size(), 1e30);
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < steps.size(); ++i) {
      prepare();
      barrier(default_group());
      const double start = wall_us();
      steps[i]();
      barrier(default_group());
      best[i] = std::min(best[i], (wall_us() - start) / 1e6);
    }
  }
  return best;
}

/// Returns the peak of memory that the step adds, in shards and per rank, because both ranks are in the process.
double extra_shards(const Step& step) {
  barrier(default_group());
  const double before = reset_peak();
  step();
  barrier(default_group());
  return (peak_bytes() - before) / kShardBytes / kRanks;
}

/// Returns rank 0's measurements by name.
Results measure(const std::string& folder, int rounds) {
  const Model model;
  const auto locals = model.locals();
  const std::string plain = fmt::format("{}/plain.{}", folder, get_rank()), saved = folder + "/saved";
  const auto drop = [&] {
    barrier(default_group());
    if (get_rank() == 0) {
      drop_from_page_cache(folder);
    }
  };
  const auto remove_written = [&] {
    barrier(default_group());
    std::filesystem::remove(plain);
    if (get_rank() == 0) {
      std::filesystem::remove_all(saved);
    }
  };
  const double gigabytes = kRanks * kShardBytes / 1e9;
  Results results;
  const auto save = [&] { dcp::save(saved, model.state); };
  const auto write = [&] { write_plain(plain, locals); };
  const auto writes = seconds_in_turns(rounds, remove_written, {write, save});
  results["plain_write"] = gigabytes / writes[0];
  results["save"] = gigabytes / writes[1];
  remove_written();
  results["save_extra"] = extra_shards(save);
  write();
  dcp::State state = model.state;
  const auto load = [&] { dcp::load(saved, state); };
  const auto reads = seconds_in_turns(rounds, drop, {[&] { read_plain(plain, locals); }, load});
  results["plain_read"] = gigabytes / reads[0];
  results["load"] = gigabytes / reads[1];
  results["load_extra"] = extra_shards(load);
  const auto copy = at::zeros({static_cast<int64_t>(kShardBytes)}, at::kByte);
  const auto copy_all = [&] {
    auto* target = static_cast<char*>(copy.mutable_data_ptr());
    for (const auto& tensor : locals) {
      target = std::copy_n(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes(), target);
    }
  };
  dcp::Checkpointer checkpointer(folder + "/run", {.keep_last = 1});
  checkpointer.async_save(0, model.state);
  int64_t step = 0;
  const auto copies = seconds_in_turns(rounds, [&] { checkpointer.wait(); },
                                       {copy_all, [&] { checkpointer.async_save(++step, model.state); }});
  results["memcpy"] = 1e3 * copies[0];
  results["async_save_blocks"] = 1e3 * copies[1];
  checkpointer.wait();
  return results;
}

void run(const BenchmarkOptions& options) {
  const testing::TempFolder folder;
  Results results = thread_ranks(kRanks, [&] { return measure(folder.path(), options.rounds); });
  results["save_over_write"] = results["save"] / results["plain_write"];
  results["load_over_read"] = results["load"] / results["plain_read"];
  results["async_save_over_memcpy"] = results["async_save_blocks"] / results["memcpy"];
  const auto peer = run_peer("benchmarks/peers/checkpoint_peer.py", fmt::format("--rounds {}", options.rounds));
  const std::pair<const char*, std::vector<const char*>> units[] = {
      {"GB/s", {"plain_write", "save", "plain_read", "load"}},
      {"ms", {"memcpy", "async_save_blocks"}},
      {"x", {"save_over_write", "load_over_read", "async_save_over_memcpy"}},
      {"shards", {"save_extra", "load_extra"}}};
  for (const auto& [unit, names] : units) {
    for (const char* name : names) {
      print_result(name, results.at(name), unit, peer, options.json);
    }
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::benchmark_main(
      argc, argv,
      {.name = "checkpoint",
       .description = "What saving and loading costs beside plain files. TMPDIR says which disk.",
       .rounds = 15,
       .run = tessera::run});
}
