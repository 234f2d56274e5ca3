// What saving and loading costs beside plain files: 2 ranks as threads, each with a shard of 32 float32 tensors.
//
//   plain_write, plain_read    each rank its shard, one file a rank, fsync; read from the disk
//   save, load                 the same bytes through dcp::save and dcp::load
//   memcpy                     a rank copies its shard
//   async_save_blocks          how long async_save keeps training from going on, from the second one on
//   save_extra, load_extra     the most memory beside the tensors, over both ranks, in shards
//
// TMPDIR says which disk. PEER_PYTHON runs checkpoint_peer.py too: PyTorch's distributed checkpoint on the same bytes.

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "benchmarks/measure.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/file_io.h"
#include "comm/collectives.h"
#include "comm/process_group.h"
#include "dtensor/dtensor.h"
#include "testing/run_ranks.h"
#include "testing/temp_folder.h"

namespace tessera {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kTensors = 32;
constexpr int64_t kRows = 1024;
constexpr int64_t kColumns = 1024;
constexpr double kShardBytes = 4.0 * kTensors * kRows * kColumns / kRanks;

/// Of this process, since the last reset.
double peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == "VmHWM:") {
      double kilobytes = 0;
      status >> kilobytes;
      return kilobytes * 1024;
    }
  }
  return 0;
}

/// The peak from here on; returns what is in use.
double reset_peak() {
  std::ofstream("/proc/self/clear_refs") << 5;
  return peak_bytes();
}

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
  std::filesystem::remove(path);
  const auto file = dcp::File::create(path, static_cast<uint64_t>(kShardBytes));
  uint64_t offset = 0;
  for (const auto& tensor : tensors) {
    file.write(tensor.const_data_ptr(), tensor.nbytes(), offset);
    offset += tensor.nbytes();
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

/// What lies in `folder` has to be read from the disk again.
void drop_from_page_cache(const std::string& folder) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    const int descriptor = entry.is_regular_file() ? ::open(entry.path().c_str(), O_RDONLY) : -1;
    if (descriptor >= 0) {
      ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
      ::close(descriptor);
    }
  }
}

/// Seconds of `step` on all ranks together, the fastest of some; `prepare` is not counted.
double seconds(int rounds, const std::function<void()>& prepare, const std::function<void()>& step) {
  double best = 1e30;
  for (int round = 0; round < rounds; ++round) {
    prepare();
    barrier(default_group());
    const double start = wall_us();
    step();
    barrier(default_group());
    best = std::min(best, (wall_us() - start) / 1e6);
  }
  return best;
}

/// What rank 0 measures, by name.
Results measure(const std::string& folder, int rounds) {
  const Model model;
  const auto locals = model.locals();
  const std::string plain = fmt::format("{}/plain.{}", folder, get_rank()), saved = folder + "/saved";
  const auto nothing = [] {};
  const auto drop = [&] {
    barrier(default_group());
    if (get_rank() == 0) {
      drop_from_page_cache(folder);
    }
  };
  const auto remove_saved = [&] {
    barrier(default_group());
    if (get_rank() == 0) {
      std::filesystem::remove_all(saved);
    }
  };
  const double gigabytes = kRanks * kShardBytes / 1e9;
  Results results;
  results["plain_write"] = gigabytes / seconds(rounds, nothing, [&] { write_plain(plain, locals); });
  double before = reset_peak();
  results["save"] = gigabytes / seconds(rounds, remove_saved, [&] { dcp::save(saved, model.state); });
  results["save_extra"] = (peak_bytes() - before) / kShardBytes;
  results["plain_read"] = gigabytes / seconds(rounds, drop, [&] { read_plain(plain, locals); });
  dcp::State state = model.state;
  before = reset_peak();
  results["load"] = gigabytes / seconds(rounds, drop, [&] { dcp::load(saved, state); });
  results["load_extra"] = (peak_bytes() - before) / kShardBytes / kRanks;
  const auto copy = at::zeros({static_cast<int64_t>(kShardBytes)}, at::kByte);
  results["memcpy"] = 1e3 * seconds(rounds, nothing, [&] {
                        auto* target = static_cast<char*>(copy.mutable_data_ptr());
                        for (const auto& tensor : locals) {
                          target =
                              std::copy_n(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes(), target);
                        }
                      });
  dcp::Checkpointer checkpointer(folder + "/run", {.keep_last = 1});
  checkpointer.async_save(0, model.state);
  int64_t step = 0;
  results["async_save_blocks"] =
      1e3 * seconds(
                rounds, [&] { checkpointer.wait(); }, [&] { checkpointer.async_save(++step, model.state); });
  checkpointer.wait();
  return results;
}

int run(const StepBenchmark& benchmark) {
  const testing::TempFolder folder;
  Results results;
  run_ranks(kRanks, [&](int rank) {
    auto own = measure(folder.path(), benchmark.rounds);
    if (rank == 0) {
      results = std::move(own);
    }
  });
  const auto peer = benchmark.host_only ? Results() : run_peer("benchmarks/checkpoint_peer.py");
  for (const std::string name : {"plain_write", "save", "plain_read", "load"}) {
    print_result(name, results.at(name), "GB/s", peer, benchmark.json);
  }
  for (const std::string name : {"memcpy", "async_save_blocks"}) {
    print_result(name, results.at(name), "ms", peer, benchmark.json);
  }
  for (const std::string name : {"save_extra", "load_extra"}) {
    print_result(name, results.at(name), "shards", peer, benchmark.json);
  }
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  at::set_num_threads(1);
  try {
    return tessera::run(tessera::StepBenchmark::from_arguments(argc, argv));
  } catch (const std::exception& error) {
    fmt::print(stderr, "checkpoint: {}\n", error.what());
    return 1;
  }
}
