// Precompiled for sources that use tensors (tools/pch/pch.bzl).
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>
// {also}
