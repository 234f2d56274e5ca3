#pragma once
// Event files of TensorBoard: records with checksums (TFRecord) of protocol buffers (tensorboard.Event).
//
//   EventFile file("logs");                                        // logs/events.out.tfevents.1764374400.host.4711
//   file.write(10, {{.name = "train/loss", .value = 2.5}});

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "debug/metrics.h"

namespace tessera {

/// Thread safety: one thread at a time.
class EventFile {
 public:
  /// Makes a new file in `folder`, which exists. Throws Error if that fails.
  explicit EventFile(const std::string& folder);

  /// Adds the values as scalars and histograms of a step, and flushes them. Throws Error if the disk is full.
  void write(int64_t step, const std::vector<MetricValue>& values);

  const std::string& path() const { return path_; }

 private:
  void write_record(const std::string& event);

  std::string path_;
  std::ofstream file_;
};

namespace detail {

/// Returns the CRC-32C (Castagnoli) of `bytes`: 0xe3069283 of "123456789".
uint32_t crc32c(std::string_view bytes);

}  // namespace detail

}  // namespace tessera
