// A value, or the error that took its place. A part of etkv.hpp.
#pragma once

#include <utility>
#include <variant>

#include "etkv/error.h"
#include "etkv/error.hpp"

namespace etkv {

/// A value or the error that took its place. Ask `ok()` before the rest.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const {
    return state_.index() == 0;
  }
  explicit operator bool() const {
    return ok();
  }
  T& value() {
    return *std::get_if<0>(&state_);
  }
  const T& value() const {
    return *std::get_if<0>(&state_);
  }
  T& operator*() {
    return value();
  }
  T* operator->() {
    return &value();
  }
  const Error& error() const {
    return *std::get_if<1>(&state_);
  }

 private:
  std::variant<T, Error> state_;
};

/// Success, or the error that took its place.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() : error_(ETKV_OK, "") {}
  Result(Error error) : error_(std::move(error)) {}

  bool ok() const {
    return error_.status() == ETKV_OK;
  }
  explicit operator bool() const {
    return ok();
  }
  const Error& error() const {
    return error_;
  }

 private:
  Error error_;
};

} // namespace etkv
