#include "debug/event_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace tessera {

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint32_t kCastagnoli = 0x82f63b78;  // bit-reversed

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kCastagnoli : 0);
    }
    table[byte] = crc;
  }
  return table;
}

/// TFRecord's masking, so that checksums of records that contain checksums stay meaningful.
uint32_t masked_crc(std::string_view bytes) {
  return std::rotr(detail::crc32c(bytes), 15) + 0xa282ead8;
}

template <class T>
std::string raw_bytes(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// Builder of a protocol buffer message.
class Message {
 public:
  Message& varint(int field, uint64_t value) {
    tag(field, 0);
    append_varint(value);
    return *this;
  }
  Message& number(int field, double value) {
    tag(field, 1);
    text_ += raw_bytes(value);
    return *this;
  }
  Message& number(int field, float value) {
    tag(field, 5);
    text_ += raw_bytes(value);
    return *this;
  }
  Message& bytes(int field, std::string_view value) {
    tag(field, 2);
    append_varint(value.size());
    text_ += value;
    return *this;
  }
  Message& numbers(int field, const std::vector<double>& values) {
    std::string packed;
    for (const double value : values) {
      packed += raw_bytes(value);
    }
    return bytes(field, packed);
  }
  const std::string& text() const { return text_; }

 private:
  void tag(int field, int wire_type) { append_varint(static_cast<uint64_t>(field) << 3 | wire_type); }
  void append_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
      text_ += static_cast<char>(value | 0x80);
    }
    text_ += static_cast<char>(value);
  }

  std::string text_;
};

/// Returns a tensorboard.HistogramProto. The minimum and maximum are unknown and approximated by the bounds.
std::string histogram_message(const MetricValue& value) {
  double total = 0;
  for (const double count : value.counts) {
    total += count;
  }
  auto limits = value.bounds;
  limits.push_back(std::numeric_limits<double>::max());
  return Message()
      .number(1, value.bounds.front())
      .number(2, value.bounds.back())
      .number(3, total)
      .number(4, value.value)
      .numbers(6, limits)
      .numbers(7, value.counts)
      .text();
}

/// Returns a tensorboard.Summary.Value.
std::string summary_value(const MetricValue& value) {
  Message message;
  message.bytes(1, value.name);
  if (value.kind == MetricKind::Histogram) {
    message.bytes(5, histogram_message(value));
  } else {
    message.number(2, static_cast<float>(value.value));
  }
  return message.text();
}

}  // namespace

namespace detail {

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = make_crc_table();
  uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

}  // namespace detail

EventFile::EventFile(const std::string& folder) {
  static std::atomic<int> count{0};
  const auto stem = fmt::format("{}/events.out.tfevents.{}.{}.{}", folder, static_cast<int64_t>(seconds_since_1970()),
                                host_name(), getpid());
  path_ = fmt::format("{}.{}", stem, count++);
  file_.open(path_, std::ios::binary);
  write_record(Message().number(1, seconds_since_1970()).bytes(3, "brain.Event:2").text());
  file_.flush();
  TESSERA_CHECK(Error, file_.good(), "{}: cannot be written: {}", path_, std::strerror(errno));
}

void EventFile::write_record(const std::string& event) {
  const auto length = raw_bytes(static_cast<uint64_t>(event.size()));
  file_ << length << raw_bytes(masked_crc(length)) << event << raw_bytes(masked_crc(event));
}

void EventFile::write(int64_t step, const std::vector<MetricValue>& values) {
  Message summary;
  for (const auto& value : values) {
    summary.bytes(1, summary_value(value));
  }
  write_record(
      Message().number(1, seconds_since_1970()).varint(2, static_cast<uint64_t>(step)).bytes(5, summary.text()).text());
  file_.flush();
  TESSERA_CHECK(Error, file_.good(), "{}: cannot be written: {}", path_, std::strerror(errno));
}

}  // namespace tessera
