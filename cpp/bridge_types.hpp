// The C++ types that the bridge's Rust side calls: interpreter.hpp's, with the
// bridge's own strings and slices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cpp/interpreter.hpp"
#include "rust/cxx.h"

namespace etkv::bridge {

/// The program's constants, by name.
class Constants {
 public:
  explicit Constants(interpreter::Constants& host) : host_(host) {}

  bool find(rust::Str name) {
    return host_.find({name.data(), name.size()});
  }
  rust::Slice<const std::uint8_t> bytes() const {
    const auto bytes = host_.bytes();
    if (bytes.data == nullptr) {
      return {};
    }
    return {bytes.data, bytes.size};
  }

 private:
  interpreter::Constants& host_;
};

/// Where a program's outputs go.
class Outputs {
 public:
  explicit Outputs(interpreter::Outputs& host) : host_(host) {}

  std::int8_t scalar_type(std::size_t index) const {
    return host_.scalar_type(index);
  }
  rust::String write(
      std::size_t index,
      rust::Slice<const std::int32_t> shape,
      rust::Slice<const std::uint8_t> bytes) {
    return rust::String::lossy(host_.write(
        index, {shape.data(), shape.size()}, {bytes.data(), bytes.size()}));
  }
  void write_integer(std::size_t index, std::int64_t value) {
    host_.write_integer(index, value);
  }

 private:
  interpreter::Outputs& host_;
};

} // namespace etkv::bridge
