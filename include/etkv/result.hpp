// A value or an error. A part of etkv.hpp.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>

#include "etkv/error.h"
#include "etkv/error.hpp"

namespace etkv {

namespace detail {
/// Ends the process, because a caller read a value or an error that a Result
/// does not have. These headers do not throw.
[[noreturn]] inline void result_has_none(const char* what, const Error* error) {
  if (error != nullptr) {
    std::fprintf(
        stderr,
        "etkv: read the %s of a Result that has an error: %s: %s\n",
        what,
        error->status_name(),
        error->message().c_str());
  } else {
    std::fprintf(
        stderr, "etkv: read the %s of a Result that succeeded\n", what);
  }
  std::fflush(stderr);
  std::abort();
}
} // namespace detail

/// A value or an error, in the shape of `std::expected<T, etkv::Error>`.
///
/// Where std::expected throws or has undefined behaviour, a Result ends the
/// process with the error's message on stderr: `*`, `->` and `value()` of a
/// Result without a value, and `error()` of one with a value. So write
/// `*session->cache().length()` only where a failure would be a defect.
///
/// A Result<bool> does not convert to bool, because a test of the Result could
/// be mistaken for a test of the value. Call has_value() to test the Result,
/// and `*` or value_or() to test the value.
template <typename T>
class [[nodiscard]] Result {
 public:
  using value_type = T;
  using error_type = Error;

  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool has_value() const {
    return state_.index() == 0;
  }
  template <typename U = T>
  explicit operator bool() const {
    static_assert(
        !std::is_same_v<U, bool>,
        "a Result<bool> is not a condition: read its value with * or "
        "value_or()");
    return has_value();
  }
  /// The same as has_value(), as in ExecuTorch's Result.
  bool ok() const {
    return has_value();
  }

  T& value() & {
    check();
    return *std::get_if<0>(&state_);
  }
  const T& value() const& {
    check();
    return *std::get_if<0>(&state_);
  }
  T&& value() && {
    check();
    return std::move(*std::get_if<0>(&state_));
  }
  T& operator*() & {
    return value();
  }
  const T& operator*() const& {
    return value();
  }
  T&& operator*() && {
    return std::move(*this).value();
  }
  T* operator->() {
    return &value();
  }
  const T* operator->() const {
    return &value();
  }
  /// Returns the value, or `otherwise` if there is an error.
  template <typename U>
  T value_or(U&& otherwise) const& {
    return has_value() ? **this : static_cast<T>(std::forward<U>(otherwise));
  }
  template <typename U>
  T value_or(U&& otherwise) && {
    return has_value() ? std::move(**this)
                       : static_cast<T>(std::forward<U>(otherwise));
  }

  const Error& error() const& {
    check_error();
    return *std::get_if<1>(&state_);
  }
  Error&& error() && {
    check_error();
    return std::move(*std::get_if<1>(&state_));
  }

  /// Calls `next` with the value, and returns the Result of `next`. Without a
  /// value, returns the error.
  template <typename F>
  auto and_then(
      F&& next) const& -> std::decay_t<std::invoke_result_t<F, const T&>> {
    if (!has_value()) {
      return error();
    }
    return std::invoke(std::forward<F>(next), **this);
  }
  template <typename F>
  auto and_then(F&& next) && -> std::decay_t<std::invoke_result_t<F, T&&>> {
    if (!has_value()) {
      return std::move(*this).error();
    }
    return std::invoke(std::forward<F>(next), *std::move(*this));
  }

  /// Calls `change` with the value, and returns what `change` returns, as a
  /// Result. Without a value, returns the error.
  template <typename F>
  auto transform(F&& change)
      const& -> Result<std::decay_t<std::invoke_result_t<F, const T&>>> {
    if (!has_value()) {
      return error();
    }
    return changed(std::forward<F>(change), **this);
  }
  template <typename F>
  auto transform(
      F&& change) && -> Result<std::decay_t<std::invoke_result_t<F, T&&>>> {
    if (!has_value()) {
      return std::move(*this).error();
    }
    return changed(std::forward<F>(change), *std::move(*this));
  }

 private:
  template <typename F, typename V>
  static auto changed(F&& change, V&& value)
      -> Result<std::decay_t<std::invoke_result_t<F, V&&>>> {
    if constexpr (std::is_void_v<std::invoke_result_t<F, V&&>>) {
      std::invoke(std::forward<F>(change), std::forward<V>(value));
      return {};
    } else {
      return std::invoke(std::forward<F>(change), std::forward<V>(value));
    }
  }
  void check() const {
    if (!has_value()) {
      detail::result_has_none("value", std::get_if<1>(&state_));
    }
  }
  void check_error() const {
    if (has_value()) {
      detail::result_has_none("error", nullptr);
    }
  }

  std::variant<T, Error> state_;
};

/// Success, or an error.
template <>
class [[nodiscard]] Result<void> {
 public:
  using value_type = void;
  using error_type = Error;

  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  bool has_value() const {
    return !error_.has_value();
  }
  explicit operator bool() const {
    return has_value();
  }
  /// The same as has_value(), as in ExecuTorch's Result.
  bool ok() const {
    return has_value();
  }

  /// Ends the process if there is an error.
  void value() const {
    if (error_) {
      detail::result_has_none("value", &*error_);
    }
  }
  void operator*() const {
    value();
  }

  const Error& error() const& {
    check_error();
    return *error_;
  }
  Error&& error() && {
    check_error();
    return std::move(*error_);
  }

  /// Calls `next` and returns its Result; or returns the error, if there is
  /// one.
  template <typename F>
  auto and_then(F&& next) const -> std::decay_t<std::invoke_result_t<F>> {
    if (!has_value()) {
      return error();
    }
    return std::invoke(std::forward<F>(next));
  }

  /// Calls `next` and returns its value as a Result; or returns the error, if
  /// there is one.
  template <typename F>
  auto transform(F&& next) const
      -> Result<std::decay_t<std::invoke_result_t<F>>> {
    if (!has_value()) {
      return error();
    }
    if constexpr (std::is_void_v<std::invoke_result_t<F>>) {
      std::invoke(std::forward<F>(next));
      return {};
    } else {
      return std::invoke(std::forward<F>(next));
    }
  }

 private:
  void check_error() const {
    if (!error_) {
      detail::result_has_none("error", nullptr);
    }
  }

  std::optional<Error> error_ = std::nullopt;
};

} // namespace etkv
