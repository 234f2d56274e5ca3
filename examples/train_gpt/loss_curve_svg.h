#pragma once
// Draws training and validation loss as an SVG picture.

#include <string>

#include "examples/train_gpt/trainer.h"

namespace tessera::examples {

/// Returns a self-contained SVG document, with `title` above the curves.
std::string loss_curve_svg(const LossHistory& history, const std::string& title);

/// Throws ValueError, naming the file, if it cannot be written.
void write_loss_curve(const std::string& path, const LossHistory& history, const std::string& title);

}  // namespace tessera::examples
