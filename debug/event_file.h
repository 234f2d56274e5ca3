#pragma once
// TensorBoard event files: records with checksums (TFRecord) that contain protocol buffers (tensorboard.Event).
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

/// Writes one event file. Thread safety: one thread at a time.
class EventFile {
 public:
  /// Creates a new file in the existing folder `folder`. Throws Error on failure.
  explicit EventFile(const std::string& folder);

  /// Writes the values of a step as scalars and histograms, and flushes them. Throws Error if the disk is full.
  void write(int64_t step, const std::vector<MetricValue>& values);

  const std::string& path() const { return path_; }

 private:
  void write_record(const std::string& event);

  std::string path_;
  std::ofstream file_;
};

namespace detail {

/// Returns the CRC-32C (Castagnoli) of `bytes`; for "123456789" it is 0xe3069283.
uint32_t crc32c(std::string_view bytes);

}  // namespace detail

}  // namespace tessera
