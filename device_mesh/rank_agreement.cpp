#include "device_mesh/rank_agreement.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/error.h"
#include "comm/all_gather_strings.h"

namespace tessera {

namespace {

/// Packs strings into one, each preceded by its size, or unpacks them.
std::string packed(const std::vector<std::string>& texts) {
  std::string result;
  for (const auto& text : texts) {
    result += fmt::format("{}:{}", text.size(), text);
  }
  return result;
}

std::vector<std::string> unpacked(const std::string& text) {
  std::vector<std::string> result;
  for (size_t begin = 0; begin < text.size(); begin += result.back().size()) {
    const size_t colon = text.find(':', begin);
    const size_t size = std::stoull(text.substr(begin, colon - begin));
    begin = colon + 1;
    result.push_back(text.substr(begin, size));
  }
  return result;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  lines.push_back(text.substr(begin));
  return lines;
}

std::string line_at(const std::vector<std::string>& lines, size_t i) {
  return i < lines.size() ? lines[i] : "nothing more";
}

/// Checks agreement on all meshes, regardless of the result on one, and throws `failure`, which `fault` describes, or
/// else the first difference.
void check_each(const std::vector<DeviceMesh>& meshes, const std::string& where,
                const std::function<std::vector<std::string>(const DeviceMesh&)>& items_on, std::string fault,
                std::exception_ptr failure) {
  for (const auto& mesh : meshes) {
    try {
      check_agreement(mesh, where, {.items = items_on(mesh), .fault = fault});
    } catch (const ValueError& error) {
      if (!failure) {
        failure = std::current_exception();
        fault = error.what();
      }
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace

std::vector<std::string> all_gather_strings(const DeviceMesh& mesh, const std::string& text) {
  std::vector<std::string> texts = {text};
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    std::vector<std::string> wider;
    for (const auto& part : all_gather_strings(mesh.group(axis), packed(texts))) {
      const auto inner = unpacked(part);
      wider.insert(wider.end(), inner.begin(), inner.end());
    }
    texts = std::move(wider);
  }
  return texts;
}

void check_agreement(const DeviceMesh& mesh, const std::string& where, const Statement& own) {
  // One string per rank: the fault, then one item per line.
  const auto texts = all_gather_strings(mesh, fmt::format("{}\n{}", own.fault, fmt::join(own.items, "\n")));
  std::vector<std::vector<std::string>> lines;
  for (size_t i = 0; i < texts.size(); ++i) {
    lines.push_back(lines_of(texts[i]));
    TESSERA_CHECK(ValueError, lines[i][0].empty(), "{}: rank {} cannot: {}", where, mesh.ranks()[i], lines[i][0]);
  }
  for (size_t i = 1; i < lines.size(); ++i) {
    if (lines[i] == lines[0]) {
      continue;
    }
    size_t first = 0;
    while (line_at(lines[i], first) == line_at(lines[0], first)) {
      ++first;
    }
    TESSERA_CHECK(ValueError, false,
                  "{}: the ranks differ: rank {} has {}, rank {} has {}. All ranks make the same calls in the same "
                  "order, with modules of the same parameters",
                  where, mesh.ranks()[0], line_at(lines[0], first), mesh.ranks()[i], line_at(lines[i], first));
  }
}

void check_ranks_agree(const std::vector<DeviceMesh>& meshes, const std::string& where,
                       const std::function<std::vector<std::string>()>& step) {
  std::vector<std::string> items;
  std::exception_ptr failure;
  std::string fault;
  try {
    items = step();
  } catch (const Error& error) {
    failure = std::current_exception();
    fault = error.what();
  } catch (const std::exception& error) {  // from a function that the user passed
    failure = std::current_exception();
    fault = fmt::format("{}: {}", where, error.what());
  } catch (...) {
    failure = std::current_exception();
    fault = fmt::format("{}: an exception that is no std::exception", where);
  }
  check_each(
      meshes, where, [&](const DeviceMesh&) { return items; }, std::move(fault), std::move(failure));
}

void check_ranks_agree(const std::vector<DeviceMesh>& meshes, const std::string& where,
                       const std::function<std::vector<std::string>(const DeviceMesh&)>& items_on) {
  check_each(meshes, where, items_on, /*fault=*/{}, /*failure=*/nullptr);
}

void throw_on_all_ranks(const std::vector<DeviceMesh>& meshes, const std::string& where, const std::string& fault) {
  std::string message = fault;
  for (const auto& mesh : meshes) {
    const auto texts = all_gather_strings(mesh, message);
    const auto first = std::ranges::find_if(texts, [](const std::string& text) { return !text.empty(); });
    if (message.empty() && first != texts.end()) {
      message = fmt::format("{}: rank {} cannot: {}", where, mesh.ranks()[static_cast<size_t>(first - texts.begin())],
                            *first);
    }
  }
  TESSERA_CHECK(StateError, message.empty(), "{}", message);
}

}  // namespace tessera
