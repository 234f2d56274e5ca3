#include "examples/train_gpt/loss_curve_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "base/tick_distance.h"

namespace tessera::examples {

namespace {

constexpr double kWidth = 800;
constexpr double kHeight = 480;
constexpr double kLeft = 70;
constexpr double kRight = 730;
constexpr double kTop = 50;
constexpr double kBottom = 420;
constexpr const char* kTrainColor = "#2563eb";
constexpr const char* kValidationColor = "#d97706";

/// An axis between two round numbers, mapped to pixels.
struct Axis {
  double low = 0;
  double high = 1;
  double tick = 1;
  double pixel_low = 0;
  double pixel_high = 1;

  double pixel(double value) const { return pixel_low + (value - low) / (high - low) * (pixel_high - pixel_low); }
};

Axis loss_axis(const LossHistory& history) {
  double low = INFINITY;
  double high = 0;
  for (const auto* points : {&history.train, &history.validation}) {
    for (const LossPoint& point : *points) {
      if (std::isfinite(point.loss)) {
        low = std::min(low, point.loss);
        high = std::max(high, point.loss);
      }
    }
  }
  low = std::min(low, high);
  const double tick = tick_distance(std::max(high - low, 0.01), 8);
  return {.low = std::floor(low / tick) * tick,
          .high = (std::floor(high / tick) + 1) * tick,
          .tick = tick,
          .pixel_low = kBottom,
          .pixel_high = kTop};
}

Axis step_axis(const LossHistory& history) {
  int64_t last = 1;
  for (const auto* points : {&history.train, &history.validation}) {
    if (!points->empty()) {
      last = std::max(last, points->back().step);
    }
  }
  return {.low = 0,
          .high = static_cast<double>(last),
          .tick = std::max(1.0, tick_distance(static_cast<double>(last), 10)),
          .pixel_low = kLeft,
          .pixel_high = kRight};
}

std::string axes(const Axis& x, const Axis& y) {
  std::string svg;
  auto out = std::back_inserter(svg);
  for (int i = 0; y.low + i * y.tick <= y.high + y.tick / 2; ++i) {
    const double value = y.low + i * y.tick;
    fmt::format_to(out, "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>\n", kLeft, kRight,
                   y.pixel(value), y.pixel(value));
    fmt::format_to(out, "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.4g}</text>\n", kLeft - 8,
                   y.pixel(value) + 4, value);
  }
  for (double value = x.low; value <= x.high; value += x.tick) {
    fmt::format_to(out, "<line class=\"axis\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>\n", x.pixel(value),
                   kBottom, kBottom + 5);
    fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n", x.pixel(value),
                   kBottom + 20, value);
  }
  fmt::format_to(out, "<path class=\"axis\" d=\"M{0} {1}V{2}H{3}\"/>\n", kLeft, kTop, kBottom, kRight);
  fmt::format_to(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">step</text>\n", (kLeft + kRight) / 2,
                 kBottom + 44);
  fmt::format_to(out,
                 "<text transform=\"translate(20 {}) rotate(-90)\" text-anchor=\"middle\">loss (nats/byte)</text>\n",
                 (kTop + kBottom) / 2);
  return svg;
}

/// Draws a curve, with a gap where a loss is not finite.
std::string curve(const std::vector<LossPoint>& points, const Axis& x, const Axis& y, const char* style) {
  std::string path;
  bool pen_down = false;
  for (const LossPoint& point : points) {
    const bool finite = std::isfinite(point.loss);
    if (finite) {
      path += fmt::format("{}{:.1f} {:.1f}", pen_down ? 'L' : 'M', x.pixel(static_cast<double>(point.step)),
                          y.pixel(point.loss));
    }
    pen_down = finite;
  }
  return fmt::format("<path fill=\"none\" {} d=\"{}\"/>\n", style, path);
}

/// Returns for each point the mean over up to `width` points before it and the same number after it. The first points,
/// where the loss falls steeply, therefore keep their values.
std::vector<LossPoint> smoothed(const std::vector<LossPoint>& points, size_t width) {
  std::vector<LossPoint> result;
  for (size_t i = 0; i < points.size(); ++i) {
    const size_t before = std::min(width, i);
    const size_t after = std::min(before, points.size() - 1 - i);
    double sum = 0;
    for (size_t j = i - before; j <= i + after; ++j) {
      sum += points[j].loss;
    }
    result.push_back({.step = points[i].step, .loss = sum / static_cast<double>(before + after + 1)});
  }
  return result;
}

std::string validation_marks(const std::vector<LossPoint>& points, const Axis& x, const Axis& y) {
  std::string svg;
  for (const LossPoint& point : points) {
    if (std::isfinite(point.loss)) {
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"{}\"/>\n",
                         x.pixel(static_cast<double>(point.step)), y.pixel(point.loss), kValidationColor);
    }
  }
  if (!points.empty() && std::isfinite(points.back().loss)) {
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"{}\">{:.3f}</text>\n",
                       x.pixel(static_cast<double>(points.back().step)) + 8, y.pixel(points.back().loss) + 4,
                       kValidationColor, points.back().loss);
  }
  return svg;
}

std::string legend() {
  return fmt::format(
      "<line x1=\"590\" x2=\"620\" y1=\"70\" y2=\"70\" stroke=\"{0}\" stroke-width=\"2\"/>"
      "<text x=\"628\" y=\"74\">training</text>\n"
      "<line x1=\"590\" x2=\"620\" y1=\"92\" y2=\"92\" stroke=\"{1}\" stroke-width=\"2\"/>"
      "<circle cx=\"605\" cy=\"92\" r=\"4\" fill=\"{1}\"/><text x=\"628\" y=\"96\">validation</text>\n",
      kTrainColor, kValidationColor);
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    result += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  }
  return result;
}

}  // namespace

std::string loss_curve_svg(const LossHistory& history, const std::string& title) {
  const Axis x = step_axis(history);
  const Axis y = loss_axis(history);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n"
      "<style>.grid{{stroke:#e5e7eb}} .axis{{stroke:#374151;fill:none}}</style>\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
      "<text x=\"{2}\" y=\"28\" font-size=\"16\">{3}</text>\n",
      kWidth, kHeight, kLeft, escaped(title));
  svg += axes(x, y);
  svg += curve(history.train, x, y, fmt::format("stroke=\"{}\" stroke-opacity=\"0.3\"", kTrainColor).c_str());
  svg += curve(smoothed(history.train, history.train.size() / 50), x, y,
               fmt::format("stroke=\"{}\" stroke-width=\"2\"", kTrainColor).c_str());
  svg += curve(history.validation, x, y, fmt::format("stroke=\"{}\" stroke-width=\"2\"", kValidationColor).c_str());
  svg += validation_marks(history.validation, x, y);
  return svg + legend() + "</svg>\n";
}

void write_loss_curve(const std::string& path, const LossHistory& history, const std::string& title) {
  std::ofstream file(path);
  file << loss_curve_svg(history, title);
  file.flush();
  TESSERA_CHECK(ValueError, file.good(), "--svg {}: cannot be written: {}", path, std::strerror(errno));
}

}  // namespace tessera::examples
