#pragma once
// The course of training and validation loss as a picture (SVG, for any browser).

#include <string>

#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

/// A self-contained SVG document. `title` is shown above the curves.
std::string loss_curve_svg(const LossHistory& history, const std::string& title);

/// Throws ValueError that names the file if it cannot be written.
void write_loss_curve(const std::string& path, const LossHistory& history, const std::string& title);

}  // namespace tessera::examples
